"""The timing protocol on a clock that does as it is told."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch

from mmfast.bench.timing import (
    WARM_UPS,
    Sample,
    interleave,
    noise,
    paired,
    peak_during,
    quantile,
    timed,
    warm_up,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_timed_reads_the_clock_around_the_call() -> None:
    clock = FakeClock()

    def work() -> str:
        clock.now += 0.25
        return "done"

    assert timed(work, clock) == ("done", 250.0)


@pytest.mark.parametrize(
    ("seconds", "runs"), [(0.0, WARM_UPS), (1.5, 3), (100.0, 1)], ids=["cheap", "slow", "huge"]
)
def test_warm_up_stops_early_where_runs_are_long(seconds: float, runs: int) -> None:
    clock = FakeClock()

    def job() -> None:
        clock.now += seconds

    assert warm_up(job, clock) == runs


@pytest.mark.slow
def test_drift_cancels_in_paired_ratios() -> None:
    """A machine that gets slower and slower: medians are off, paired ratios are not."""
    clock, speed = FakeClock(), [1.0]

    def job(cost: float) -> Callable[[], Sample]:
        def run() -> Sample:
            speed[0] *= 1.02
            return {
                "llm": timed(lambda: setattr(clock, "now", clock.now + cost * speed[0]), clock)[1]
            }

        return run

    jobs = {"stock": job(4.0), "fast": job(1.0), "again": job(4.0)}
    samples = interleave(jobs, rounds=12)
    times = {name: [s["llm"] for s in runs] for name, runs in samples.items()}
    assert all(len(runs) == 12 for runs in times.values())
    assert max(times["stock"]) > 1.8 * min(times["stock"])
    assert paired(times["stock"], times["fast"]) == pytest.approx(4.0, rel=0.03)
    assert 0.0 < noise(times["stock"], times["again"]) < 0.05


def test_order_rotates_and_turns_round() -> None:
    order: list[str] = []
    jobs = {name: lambda name=name: (order.append(name), {})[1] for name in "abc"}
    ticks: list[int] = []
    interleave(jobs, 3, tick=lambda: ticks.append(1))
    assert order == [*"abc", *"acb", *"cab"]
    assert len(ticks) == 9


def test_noise_is_the_larger_of_bias_and_spread() -> None:
    assert noise([1.1, 1.1, 1.1], [1.0, 1.0, 1.0]) == pytest.approx(0.1)
    assert noise([1.2, 1.0, 0.8], [1.0, 1.0, 1.0]) == pytest.approx(0.2)
    assert noise([1.0, 2.0], [1.0, 2.0]) == 0.0


def test_quantile_is_numpys() -> None:
    values = [5.0, 1.0, 4.0, 2.0]
    for q in (0.0, 0.2, 0.5, 0.8, 1.0):
        expected = torch.tensor(values, dtype=torch.float64).quantile(q).item()
        assert quantile(values, q) == pytest.approx(expected)


@pytest.mark.skipif(sys.platform != "linux", reason="the resident peak can be reset on Linux only")
def test_peak_is_of_this_run_alone() -> None:
    megabytes = 200
    idle = peak_during(lambda: None)
    busy = peak_during(lambda: torch.ones(megabytes * 250_000))
    assert busy - idle > 0.8 * megabytes
    assert peak_during(lambda: None) - idle < 0.3 * megabytes
