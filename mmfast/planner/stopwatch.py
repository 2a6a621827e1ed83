"""How long a short job takes: often enough to be sure, not longer than that is worth."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from mmfast.models.timing import Clock, timed

SLOW_MS = 400.0  # a job this long is timed once more and no oftener
SAMPLES = 5
SAMPLE_MS = 20.0  # shorter jobs run several times per sample, so that the clock and launches vanish


def duration(job: Callable[[], Any], clock: Clock = time.perf_counter) -> float:
    """Milliseconds of `job`: the median of five samples; of a slow job the better of two runs."""
    _, first = timed(job, clock)
    _, once = timed(job, clock) if first < 4 * SLOW_MS else (None, first)
    if once > SLOW_MS:
        return min(first, once)
    count = max(1, min(20, int(SAMPLE_MS / max(once, 1e-3))))

    def sample() -> None:
        for _ in range(count):
            job()

    return median(timed(sample, clock)[1] / count for _ in range(SAMPLES))
