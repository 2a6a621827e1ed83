"""Timing that can be trusted on a shared machine: interleaved rounds, medians, an A/A pair."""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from mmfast.core.errors import MmfastError
from mmfast.core.trace import peak_bytes
from mmfast.models.timing import Clock as Clock
from mmfast.models.timing import timed as timed
from mmfast.streams.archive.tiers import give_back

Sample = Mapping[str, float]  # milliseconds by stage, of one run

T = TypeVar("T")
Timer = Callable[[Callable[[], T]], tuple[T, float]]

WARM_UPS = 10
FEWEST = 3  # rounds, however short the time is
WARM_SECONDS = 4.0  # a job that takes longer than this is warm after one run


@contextmanager
def frozen() -> Iterator[None]:
    """Put what exists already out of the garbage collector's sight: a pass takes 1 s otherwise."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def clock_of(device: torch.device, threads: int) -> tuple[Clock, str]:
    """What tells the time, and its name: on one CPU thread other load should not count."""
    if device.type == "cpu" and threads == 1:
        return time.process_time, "processor time of the process"
    return time.perf_counter, "wall"


def timed_by_events(fn: Callable[[], T]) -> tuple[T, float]:
    """Run `fn` and return its result and milliseconds between two CUDA events around it."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    result = fn()
    last.record()
    torch.cuda.synchronize()
    return result, float(first.elapsed_time(last))


def warm_up(job: Callable[[], object], clock: Clock = time.perf_counter) -> int:
    """Run `job` ten times, or for four seconds, but once at least; returns how often."""
    start, count = clock(), 0
    while count < WARM_UPS and (count == 0 or clock() - start < WARM_SECONDS):
        job()
        count += 1
    return count


def interleave(
    jobs: Mapping[str, Callable[[], Sample]],
    rounds: int,
    tick: Callable[[], None] = lambda: None,
    enough: Callable[[], bool] = lambda: False,
) -> dict[str, list[Sample]]:
    """Run every job once a round, and stop after a round once `enough()`.

    The order starts one job later each round and runs backwards in every other one: drift of a
    shared machine then meets all jobs alike, and neighbours (a method and its fixed-index twin)
    stay neighbours.
    """
    names = list(jobs)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        order = names[turn:] + names[:turn]
        gc.collect()
        gc.disable()
        try:
            for name in order if number % 2 == 0 else reversed(order):
                samples[name].append(jobs[name]())
                tick()
        finally:
            gc.enable()
        if number + 1 >= FEWEST and enough():
            break
    return samples


def quantile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated quantile, as numpy's default."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Median over rounds of above / below: what both suffered in a round cancels."""
    return median(a / b for a, b in zip(above, below, strict=True))


def noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Noise floor from two runs of the same thing per round, as a share.

    The larger of how far the median ratio is from 1 and how far a typical round is.
    """
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return max(abs(median(ratios) - 1.0), median(abs(r - 1.0) for r in ratios))


def peak_during(job: Callable[[], object]) -> float:
    """Peak megabytes while `job` runs, in a pass of its own: weights and activations.

    CUDA: the allocator's peak. Linux: the peak resident set, reset before the run. Elsewhere
    the process's peak so far, which is only an upper bound.
    """
    reset_peak()
    job()
    return peak_now()


def reset_peak() -> None:
    """Forget the peak so far."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    else:
        _reset_resident_peak()


def peak_now() -> float:
    """Peak megabytes since `reset_peak`, by the means that `peak_during` names."""
    return (peak_bytes() if torch.cuda.is_initialized() else _resident_peak()) / 1e6


def _reset_resident_peak() -> None:
    gc.collect()
    if sys.platform == "linux":
        give_back()  # freed memory would count as resident
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _resident_peak() -> int:
    if sys.platform != "linux":
        return peak_bytes()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one thread, so that the time of the process is the time it takes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


FLUSH_BYTES = 256 << 20  # an H200 caches 60 MB, its successors twice as much
Job = Callable[[], object]


def device_times(
    jobs: Mapping[str, Job],
    rounds: int,
    device: torch.device | str,
    flush: bool = True,
) -> dict[str, list[float]]:
    """Milliseconds of every job in every round, the jobs of a round in shuffled order.

    On CUDA a job stands between two events of the current stream; on the CPU it is the time of
    this process, all threads added up, so other load on the machine counts little. Each job is
    warmed up ten times first, one that takes long less often. A job that should not find its
    input in a cache has to rotate inputs itself: the same call may use another set each time.

    Args:
        jobs: What to run, by name.
        rounds: Runs of each.
        device: Where the jobs run; they move nothing there themselves.
        flush: Overwrite the second-level cache before each run on CUDA. The writing also keeps
            the device busy while the host queues the job: without it a job shorter than its
            launch is timed with its launch.

    Raises:
        MmfastError: No job, no round, or a device that is neither CPU nor CUDA.
    """
    where = torch.device(device)
    if not jobs or rounds < 1:
        raise MmfastError(f"{len(jobs)} jobs in {rounds} rounds measure nothing; give at least 1")
    if where.type not in ("cpu", "cuda"):
        raise MmfastError(f"no clock for device {str(device)!r}; choices: cpu, cuda")
    for job in jobs.values():
        warm_up(_drained(job, where))
    one_round = _cuda_rounds(where, flush) if where.type == "cuda" else _process_round
    order, dice = list(jobs), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in jobs}
    with frozen():
        for _ in range(rounds):
            dice.shuffle(order)
            gc.collect()
            gc.disable()
            try:
                for name, ms in one_round({name: jobs[name] for name in order}).items():
                    times[name].append(ms)
            finally:
                gc.enable()
    return times


def _drained(job: Job, device: torch.device) -> Job:
    """The job and the wait for it, so that warming up sees how long it takes."""
    if device.type != "cuda":
        return job

    def run() -> None:
        job()
        torch.cuda.synchronize(device)

    return run


def _process_round(jobs: Mapping[str, Job]) -> dict[str, float]:
    times = {}
    for name, job in jobs.items():
        start = time.process_time()
        result = job()
        times[name] = (time.process_time() - start) * 1e3
        del result  # freed outside the clock
    return times


def _cuda_rounds(
    device: torch.device, flush: bool
) -> Callable[[Mapping[str, Job]], dict[str, float]]:
    buffer = torch.empty(FLUSH_BYTES if flush else 0, dtype=torch.int8, device=device)

    def one_round(jobs: Mapping[str, Job]) -> dict[str, float]:
        marks = {}
        with torch.cuda.device(device):
            for name, job in jobs.items():
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                buffer.zero_()
                first.record()
                job()
                last.record()
                marks[name] = (first, last)
            torch.cuda.synchronize(device)
        return {name: float(first.elapsed_time(last)) for name, (first, last) in marks.items()}

    return one_round
