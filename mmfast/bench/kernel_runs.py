"""What the benchmarks of kernels share: inputs in turn, poisoned memory, times, bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from mmfast.bench.ceilings import ceilings
from mmfast.bench.measure import peak_during, quantile

T = TypeVar("T")
R = TypeVar("R")


def turns(way: Callable[[T], R], inputs: Sequence[T]) -> Callable[[], R]:
    """`way` on each of the inputs in turn, so that none is found in a cache."""
    calls = iter(range(1 << 62))
    return lambda: way(inputs[next(calls) % len(inputs)])


@contextmanager
def poisoned(*, warn_only: bool = False) -> Iterator[None]:
    """Fresh memory is filled with NaN, as torch does where it is to be deterministic."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def timing(times: Sequence[float]) -> dict[str, float]:
    """Median of milliseconds and how far they lie apart."""
    return {
        "median_ms": quantile(times, 0.5),
        "p20_ms": quantile(times, 0.2),
        "p80_ms": quantile(times, 0.8),
    }


def bandwidth(moved: int, ms: float) -> dict[str, float]:
    """What so many bytes in that time are beside a copy on a GPU."""
    reached = moved / ms / 1e6
    return {"gb_s": reached, "of_copy": reached / ceilings("cuda")["copy_gb_s"]}


def extra_mb(job: Callable[[], object]) -> float:
    """Megabytes at the peak of `job` above what is there before."""
    before = peak_during(lambda: None)
    return max(0.0, peak_during(job) - before)
