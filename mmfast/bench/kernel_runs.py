"""What the benchmarks of kernels share: inputs in turn, poisoned memory, times, bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

from mmfast.bench.results import Row
from mmfast.bench.stages import ceilings
from mmfast.bench.timing import one_thread, peak_during, quantile

T = TypeVar("T")
R = TypeVar("R")
KINDS = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32,)}


class Named(Protocol):
    """A case that says what it is."""

    @property
    def name(self) -> str:
        """For people."""
        ...


C = TypeVar("C", bound=Named)


def over_cases(
    cases: Mapping[str, Sequence[C]],
    kinds: Mapping[str, Sequence[torch.dtype]],
    measure: Callable[[C, torch.dtype, str], list[Row]],
    tick: Callable[[str, int, int], None],
) -> list[Row]:
    """Rows of every case in every dtype on CUDA where there is one, of tiny ones on the CPU.

    Args:
        cases: Cases by kind of device.
        kinds: Dtypes by kind of device.
        measure: Rows of a case in a dtype on a device.
        tick: Told of every case.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = [(case, kind) for case in cases[device] for kind in kinds[device]]
    found: list[Row] = []
    with one_thread():
        for number, (case, kind) in enumerate(jobs):
            tick(case.name, number, len(jobs))
            found += measure(case, kind, device)
    tick("", len(jobs), len(jobs))
    return found


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
