"""Whether a stream stays as small and as fast as it was: memory and time per frame over hours.

The embedded model watches noise that changes slowly, frame by frame, with a window, an archive
whose quotas are reached early, a gate, a reducer, and a question now and then.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmfast.bench.named import Tick
from mmfast.bench.results import Row
from mmfast.bench.timing import one_thread

FRAMES, EARLY, PART = 20_000, 2_000, 1_000
MEMORY = "sink:64+window:512+retrieve:4"
QUESTION = "What colour is the circle?"
_ASK, _LOOK, _SIDE = 500, 50, 96


def rows(progress: Tick) -> list[Row]:
    """One row: 20,000 frames of the embedded model."""
    import mmfast

    pipe = mmfast.pipeline("video-stream", device="cpu", dtype="float32", reduce="dtd:0.5")
    return [measure(pipe, tick=lambda done, total: progress("frames", done, total))]


def measure(
    pipe: Any,
    frames: int = FRAMES,
    early: int = EARLY,
    part: int = PART,
    side: int = _SIDE,
    tick: Callable[[int, int], None] = lambda done, total: None,
) -> Row:
    """Watch `frames` frames and compare the time from `early` on with what was before.

    Args:
        pipe: A `video-stream` pipeline.
        frames: How many.
        early: Memory after this frame is compared with that at the end.
        part: Frames up to `early`, and at the end, whose times are compared.
        side: Height and width of a frame.
        tick: Moves a progress bar.

    Returns:
        A row: bytes that the stream holds and resident bytes of the process, each as the highest
        value up to `early` and of all, `growth` of both as shares, median processor time per
        frame in both parts and its `slowdown`.
    """
    seen, figures = _watch(pipe, frames, side, tick)
    looks = early // _LOOK
    before = statistics.median(seen.spent[early - part : early])
    after = statistics.median(seen.spent[-part:])
    memory = figures["memory"]
    return {
        "memory": MEMORY,
        "reduce": pipe.stream_model.reduce,
        "n": frames,
        "early": early,
        "held_early_mb": max(seen.held[:looks]) / 1e6,
        "held_mb": max(seen.held) / 1e6,
        "held_growth": max(seen.held) / max(seen.held[:looks]) - 1,
        "resident_early_mb": max(seen.resident[:looks]) / 1e6,
        "resident_mb": max(seen.resident) / 1e6,
        "growth": max(seen.resident) / max(seen.resident[:looks]) - 1,
        "early_ms": before,
        "late_ms": after,
        "slowdown": after / before - 1,
        "evicted": memory["evicted_blocks"],
        "rebases": memory["rebases"],
        "stored": memory["archive"]["blocks"],
        "clock": "processor time of the process",
        "threads": 1,
        "device": str(pipe.model.device),
    }


@dataclass
class _MemoryRecord:
    """Bytes that the session holds and that the process has, and milliseconds per frame."""

    held: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    spent: list[float] = field(default_factory=list)


def _watch(
    pipe: Any, frames: int, side: int, tick: Callable[[int, int], None]
) -> tuple[_MemoryRecord, dict[str, Any]]:
    seen = _MemoryRecord()
    with tempfile.TemporaryDirectory() as folder, one_thread():
        options = {"host_bytes": "2MB", "disk_bytes": "2MB", "folder": Path(folder)}
        with pipe.open(MEMORY, **options) as session:
            for i, frame in enumerate(itertools.islice(noise(side), frames)):
                start = time.process_time()
                session.push(frame, float(i))
                seen.spent.append((time.process_time() - start) * 1e3)
                if i % _ASK == _ASK - 1:
                    session.ask(QUESTION, max_new_tokens=4).read()
                if i % _LOOK == _LOOK - 1:
                    gc.collect()
                    seen.held.append(bytes_of(session))
                    seen.resident.append(_resident())
                    tick(i + 1, frames)
            return seen, session.stats()


def noise(side: int, seed: int = 0) -> Iterator[NDArray[np.uint8]]:
    """Endless frames `[side, side, 3]`: a picture that one of its quarters leaves at a time."""
    random = np.random.default_rng(seed)
    frame = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
    half = side // 2
    while True:
        y, x = (int(random.integers(2)) * half for _ in range(2))
        new = random.integers(0, 256, (half, half, 3), dtype=np.uint8)
        frame = frame.copy()
        frame[y : y + half, x : x + half] = new
        yield frame


def bytes_of(session: Any) -> int:
    """What a session holds: keys and values, stored blocks and their index."""
    memory = session.stats()["memory"]
    archive = memory["archive"]
    stored: int = sum(archive["bytes"].values())
    return int(memory["bytes"]) + stored + int(archive["index_bytes"])


def _resident() -> int:
    pages = Path("/proc/self/statm")
    if not pages.is_file():  # elsewhere what the session holds has to do
        return 1
    return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
