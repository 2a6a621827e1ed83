"""Jobs of a stream in turn against the first of them, on the processor clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from mmfast.bench.results import Row
from mmfast.bench.timing import frozen, interleave, noise, one_thread, paired, quantile, timed


def compare(jobs: Mapping[str, Callable[[], object]], rounds: int) -> list[Row]:
    """Time jobs in turn, the first one twice a round, and compare the others with it.

    The clock is the processor time of this process: on a machine that others use, too, it says
    what a quiet one would.

    Args:
        jobs: The baseline first. Each is run once before the clock starts.
        rounds: How often.

    Returns:
        A row per job: `job`, `p20_ms`, `median_ms`, `p80_ms`, `speedup`, `saved` (share of the
        baseline's time), `noise` (of an A/A pair) and `n`.
    """
    first, *others = jobs

    def sample(job: Callable[[], object]) -> Callable[[], dict[str, float]]:
        return lambda: {"ms": timed(job, time.process_time)[1]}

    twice = {first: jobs[first], **{name: jobs[name] for name in others}, "again": jobs[first]}
    with torch.no_grad(), one_thread(), frozen():
        for job in jobs.values():
            job()
        found = interleave({name: sample(job) for name, job in twice.items()}, rounds)
    times = {name: [each["ms"] for each in samples] for name, samples in found.items()}
    floor = noise(times[first], times["again"])
    base = [(a + b) / 2 for a, b in zip(times[first], times.pop("again"), strict=True)]
    rows = [_row(name, times[name], base, floor) for name in jobs]
    return [{**rows[0], "speedup": 1.0, "saved": 0.0}, *rows[1:]]


def _row(name: str, times: Sequence[float], base: Sequence[float], floor: float) -> Row:
    speedup = paired(base, times)
    return {
        "job": name,
        "median_ms": statistics.median(times),
        "p20_ms": quantile(times, 0.2),
        "p80_ms": quantile(times, 0.8),
        "speedup": speedup,
        "saved": 1.0 - 1.0 / speedup,
        "noise": floor,
        "n": len(times),
        "clock": "processor time of the process",
        "threads": 1,
        "device": "cpu",
    }
