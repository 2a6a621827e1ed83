"""The index of an archive after days of video: its memory, and what a question costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.presets import get_preset
from mmfast.bench.registry import Tick, benchmark
from mmfast.bench.results import Row
from mmfast.bench.timing import ON_ONE_THREAD, one_thread, spread
from mmfast.core.kv import Clusters
from mmfast.core.registry import get
from mmfast.streams.archive.archive import LayerIndex

SHAPE, WIDTH = "qwen2.5-vl-7b", 128
FRAMES, QUESTIONS, READ = 1_000_000, 15, 64
GROUP, LOOKS = 32, (0, 32)  # groups that are looked into; 0 is what the method takes
PLACES, STAY = 2_000, 300  # scenes of the video, and frames of a visit to one
NOTES = {"visits": "visits to 2,000 places", "noise": "no frame like its neighbours"}
_PART = STAY * 20  # frames whose keys are drawn at once


@benchmark("stream", "index")
def index(tick: Tick) -> Iterator[Row]:
    """Search 1,000,000 simulated frames of a layer of the 7B shape, one by one and in groups.

    A mean key is that of the place, of the visit and of the frame; a question is about one frame.
    Frames of a second kind, a tenth as many, have nothing in common with their neighbours: there
    groups must fail.
    """
    for kind, frames in (("visits", FRAMES), ("noise", FRAMES // 10)):
        told = lambda done, kind=kind: tick(kind, done, FRAMES)
        yield from index_rows(kind, frames, QUESTIONS, told)


def index_rows(
    kind: str, frames: int, questions: int, told: Callable[[int], None] = lambda done: None
) -> list[Row]:
    """Ask the same questions in turn of the flat search and of both grouped ones."""
    method = get("retrieve", "cache").fn
    ways: dict[str, Any] = {f"retrieve:{READ}": method(READ)}
    for look in LOOKS:
        knob = f"&look={look}" if look else ""
        ways[f"retrieve:{READ}?group={GROUP}{knob}"] = method(READ, group=GROUP, look=look)
    held, asked = _filled(kind, frames, questions, told)
    spent: dict[str, list[float]] = {spec: [] for spec in ways}
    shares: dict[str, list[float]] = {spec: [] for spec in ways}
    with one_thread():
        for query in asked:
            flat: set[int] = set()
            for spec, retriever in ways.items():
                start = time.process_time()
                found = {each.number for each in held.choose(query, retriever)}
                spent[spec].append((time.process_time() - start) * 1e3)
                flat = flat or found  # the flat search comes first
                shares[spec].append(len(found & flat) / len(flat))
    base = statistics.median(spent[f"retrieve:{READ}"])
    rows = []
    for spec, times in spent.items():
        group_mb = held.group_bytes / 1e6 if "group" in spec else 0.0
        row: Row = {"preset": SHAPE, "note": NOTES[kind], "memory": spec, "n": frames}
        row |= {"index_mb": (held.nbytes - held.group_bytes) / 1e6 + group_mb, "group_mb": group_mb}
        row |= {**spread(times), "questions": questions, "speedup": base / statistics.median(times)}
        rows.append({**row, "recall": statistics.mean(shares[spec]), **ON_ONE_THREAD})
    return rows


def _filled(
    kind: str, frames: int, questions: int, told: Callable[[int], None]
) -> tuple[LayerIndex, list[Tensor]]:
    """Return the index of all frames, and queries `[Hq, 1, d]` about some of them."""
    text = get_preset(SHAPE).text
    heads, every = text["num_key_value_heads"], text["num_attention_heads"]
    gen = torch.Generator().manual_seed(0)
    places = torch.randn(PLACES, heads, WIDTH, generator=gen)
    about = set(torch.randint(frames, (questions,), generator=gen).tolist())
    held, asked = LayerIndex(torch.device("cpu"), GROUP), list[Tensor]()
    one, none = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for start in range(0, frames, _PART):
        n = min(_PART, frames - start)
        means = torch.randn(n, heads, WIDTH, generator=gen)
        if kind == "visits":
            visits = places[torch.randint(PLACES, (_PART // STAY,), generator=gen)]
            visits = visits + 0.5 * torch.randn(visits.shape, generator=gen)
            means = visits.repeat_interleave(STAY, 0)[:n] + 0.5 * means
        for i, mean in enumerate(means):
            held.add(start + i, Clusters(mean[None], one, none))
            if start + i in about:
                query = mean + 0.5 * torch.randn(mean.shape, generator=gen)
                asked.append(query.repeat_interleave(every // heads, 0)[:, None])
        told(start + n)
    return held, asked
