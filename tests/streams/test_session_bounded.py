"""Nothing grows: a short run of the benchmark with what Python holds, and the long one."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
import tracemalloc

import pytest
from stream_tools import pipe_of, watcher

from mmfast.bench.suites.stream import bounded_row, bytes_of, noise_frames

MEMORY = "sink:16+window:160+retrieve:2"
FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_grows(family: str) -> None:
    """What Python and the session hold, while frames, questions and answers come and go."""
    pipe = pipe_of(family, reduce="dtd:0.5")
    side = watcher(family).size[0]
    held, traced = [], []
    options = {"host_bytes": "200kB"}
    with pipe.open(MEMORY, **options) as session:
        for i, frame in enumerate(noise_frames(side)):
            session.push(frame, i / 2)
            if i % 10 == 9:
                session.ask("what?", max_new_tokens=2).read()
            if i == 99:
                tracemalloc.start()
            if i % 20 == 19 and i >= 119:
                gc.collect()
                held.append(bytes_of(session))
                traced.append(tracemalloc.get_traced_memory()[0])
            if i == 259:
                break
        stats = session.stats()["memory"]
    tracemalloc.stop()
    assert len(held) == 8 and max(held[4:]) <= 1.01 * max(held[:4])
    # Counted from zero at frame 100, so it fills up with what replaces older things, and then
    # stays: sixty frames of this size alone would be more.
    assert traced[-1] - traced[4] < 40_000, traced
    assert stats["evicted_blocks"] > 50 and stats["archive"]["dropped"] > 0


@pytest.mark.slow
def test_four_thousand_frames() -> None:
    # `mmfast bench --stream bounded` watches 20,000, which takes minutes.
    row = bounded_row(pipe_of("llava_onevision"), frames=4_000, early=1_500, part=500, side=24)
    assert row["held_growth"] < 0.01 and row["growth"] < 0.01, row


@pytest.mark.slow
def test_a_frame_costs_the_same_after_thousands() -> None:
    """An old session and a young one in turn, so that whatever else runs slows both."""
    pipe, frames = pipe_of("llava_onevision"), noise_frames(24)
    with pipe.open(MEMORY, host_bytes="200kB") as old, pipe.open(MEMORY, host_bytes="200kB") as new:
        for session, age in ((old, 3_000), (new, 300)):
            for i, frame in enumerate(itertools.islice(frames, age)):
                session.push(frame, float(i))
        spent: dict[int, list[float]] = {0: [], 1: []}
        for i, frame in enumerate(itertools.islice(frames, 600)):
            for which, session in enumerate((old, new)):
                start = time.process_time()
                session.push(frame, 3_000.0 + i)
                spent[which].append(time.process_time() - start)
        for session in (old, new):
            assert session.stats()["memory"]["archive"]["dropped"] > 0
    assert abs(statistics.median(spent[0]) / statistics.median(spent[1]) - 1) < 0.10
