"""Timing on a shared machine: interleaved rounds, medians, and an A/A pair for the noise."""

from __future__ import annotations

import gc
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.core.errors import MmfastError
from mmfast.core.trace import peak_bytes
from mmfast.models.cost import Clock as Clock
from mmfast.models.cost import timed as timed
from mmfast.streams.archive.tiers import give_back

Sample = Mapping[str, float]  # milliseconds by stage, of one run

T = TypeVar("T")
Timer = Callable[[Callable[[], T]], tuple[T, float]]

PROCESSOR_CLOCK = "processor time of the process"
ON_ONE_THREAD = {"clock": PROCESSOR_CLOCK, "threads": 1, "device": "cpu"}  # fields of rows
AGAIN = "again"  # the second run of the baseline in a round
WARM_UPS = 10
FEWEST = 3  # rounds, however short the time is
WARM_SECONDS = 4.0  # a job that takes longer than this is warm after one run


@contextmanager
def frozen() -> Iterator[None]:
    """Exclude all existing objects from garbage collection: a pass would take a second."""
    gc.collect()
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not before:  # a process that has frozen its objects keeps them so
            gc.unfreeze()


def clock_of(device: torch.device, threads: int) -> tuple[Clock, str]:
    """Return a clock and its name: processor time on one CPU thread, so other load is excluded."""
    if device.type == "cpu" and threads == 1:
        return time.process_time, PROCESSOR_CLOCK
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
    """Run `job` ten times, or for four seconds, but at least once; return the number of runs."""
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
    keep: bool = False,
) -> dict[str, list[Sample]]:
    """Run every job once a round, and stop after a round once `enough()`.

    With `keep`, Ctrl-C stops it too, once there are FEWEST rounds; those that are whole remain.

    The order shifts and reverses from round to round, so that drift of a shared machine meets all
    jobs alike, and neighbours (a method and its fixed-index twin) stay neighbours.
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
        except KeyboardInterrupt:
            if not keep or number < FEWEST:
                raise
            return {name: mine[:number] for name, mine in samples.items()}
        finally:
            gc.enable()
        if number + 1 >= FEWEST and enough():
            break
    return samples


def quantile(values: Sequence[float], q: float) -> float:
    """Return the linearly interpolated quantile."""
    return float(np.quantile(values, q))


def spread(times: Sequence[float]) -> dict[str, float]:
    """Return the median of milliseconds, and the quantiles 0.2 and 0.8."""
    low, high = quantile(times, 0.2), quantile(times, 0.8)
    return {"median_ms": median(times), "p20_ms": low, "p80_ms": high}


def paired(above: Sequence[float], below: Sequence[float]) -> float:
    """Return the median over rounds of above / below: load common to a round cancels."""
    return median(a / b for a, b in zip(above, below, strict=True))


def noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the noise floor: the distance of ratios from 1, of their median or a typical one."""
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    return max(abs(median(ratios) - 1.0), median(abs(r - 1.0) for r in ratios))


class PairedTimes:
    """Milliseconds of jobs by round, compared with a baseline that ran twice a round.

    The second run is called `again`; `base` is the mean of both, `noise` their difference.
    """

    def __init__(self, times: Mapping[str, Sequence[float]]) -> None:
        self.first, second = next(iter(times)), times[AGAIN]
        self.times = {name: mine for name, mine in times.items() if name != AGAIN}
        self.noise = noise(times[self.first], second)
        self.base = [(a + b) / 2 for a, b in zip(times[self.first], second, strict=True)]

    @classmethod
    def of(cls, samples: Mapping[str, Sequence[Sample]], stage: str = "ms") -> PairedTimes:
        """Select one stage of the samples that `interleave` returns."""
        return cls({name: [sample[stage] for sample in mine] for name, mine in samples.items()})

    def speedup(self, name: str) -> float:
        """Return how many times faster than the baseline a job is; 1 for the baseline."""
        return 1.0 if name == self.first else paired(self.base, self.times[name])

    def row(self, name: str) -> dict[str, Any]:
        """Return the fields of a row that compares a job with the baseline."""
        mine = self.times[name]
        figures = {"speedup": self.speedup(name), "noise": self.noise, "n": len(mine)}
        return {"job": name, **spread(mine), **figures}


def compare_jobs(
    jobs: Mapping[str, Callable[[], object]],
    rounds: int,
    shared: Mapping[str, Any],
    device: torch.device | str = "cpu",
    extra: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """Time jobs in turn on one thread without gradients; a row each, compared with the first."""
    kind = torch.device(device).type
    with torch.no_grad(), one_thread():
        found = PairedTimes(device_times({**jobs, AGAIN: next(iter(jobs.values()))}, rounds, kind))
    clock = "events" if kind == "cuda" else PROCESSOR_CLOCK
    common = {**shared, "clock": clock, "threads": 1, "device": kind}
    return [{**common, **found.row(name), **(extra or {}).get(name, {})} for name in jobs]


def peak_during(job: Callable[[], object]) -> float:
    """Peak resident megabytes while `job` runs; outside of Linux, of the process so far."""
    reset_peak()
    job()
    return peak_now()


_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_, _ATEN.clone, _ATEN.cat, _ATEN.stack, _ATEN.index_select, _ATEN._to_copy}


class OperationCount(TorchDispatchMode):
    """Operations of torch that ran, and the bytes and name of that with the largest result.

    `launches` are those that start a kernel on a GPU, `copied` the bytes that copies have written.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = self.launches = self.largest = self.copied = 0
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count it."""
        out = func(*args, **(kwargs or {}))
        self.count += 1
        # Views, and queries of a dtype or of memory, launch nothing.
        launches = isinstance(out, (Tensor, tuple)) and not func.is_view
        self.launches += launches and "aten.empty" not in str(func)
        if func.overloadpacket in _COPIES:
            self.copied += out.nbytes
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, Tensor) and value.untyped_storage().nbytes() > self.largest:
                self.largest, self.name = value.untyped_storage().nbytes(), str(func)
        return out


def counted(call: Callable[[], object]) -> OperationCount:
    """Run `call` once and count its operations: the same on every machine under any load."""
    seen = OperationCount()
    with seen:
        call()
    return seen


def extra_mb(job: Callable[[], object]) -> float:
    """Return peak megabytes while `job` runs, above those in use before."""
    before = peak_during(lambda: None)
    return max(0.0, peak_during(job) - before)


def reset_peak() -> None:
    """Reset the peak of memory."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        return
    gc.collect()
    if sys.platform == "linux":
        give_back()  # freed memory would count as resident
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_now() -> float:
    """Return peak megabytes since `reset_peak`; see `peak_during`."""
    if torch.cuda.is_initialized() or sys.platform != "linux":
        return peak_bytes() / 1e6
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def resident_bytes() -> int:
    """Return the resident memory of this process; 1 where the system has no /proc."""
    pages = Path("/proc/self/statm")
    if not pages.is_file():
        return 1
    return int(pages.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def process_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far; NaN where /proc does not list it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def threads_set(count: int | None) -> Iterator[None]:
    """Set the number of CPU threads of torch; None leaves it."""
    old = torch.get_num_threads()
    torch.set_num_threads(count or old)
    try:
        yield
    finally:
        torch.set_num_threads(old)


def one_thread() -> AbstractContextManager[None]:
    """Restrict torch to one thread, so that processor time equals elapsed time."""
    return threads_set(1)


FLUSH_BYTES = 256 << 20  # an H200 caches 60 MB, its successors twice as much
HOLD_CYCLES = 1_000_000  # half a millisecond: the host queues tens of operations meanwhile
Job = Callable[[], object]


def device_times(
    jobs: Mapping[str, Job], rounds: int, device: torch.device | str
) -> dict[str, list[float]]:
    """Milliseconds of every job in every round, the jobs of a round in shuffled order.

    On CUDA between two events of the current stream; on the CPU the time of this process, all
    threads added up. The second-level cache is overwritten before each run on CUDA, and the device
    then waits while the host queues the job, whose launches else count.
    """
    where = torch.device(device)
    if not jobs or rounds < 1:
        raise MmfastError(f"{len(jobs)} jobs in {rounds} rounds measure nothing; give at least 1")
    if where.type not in ("cpu", "cuda"):
        raise MmfastError(f"no clock for device {str(device)!r}; choices: cpu, cuda")
    for job in jobs.values():
        warm_up(partial(timed, job))
    one_round = _cuda_rounds(where) if where.type == "cuda" else _process_round
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


def _process_round(jobs: Mapping[str, Job]) -> dict[str, float]:
    times = {}
    for name, job in jobs.items():
        start = time.process_time()
        result = job()
        times[name] = (time.process_time() - start) * 1e3
        del result  # freed outside the clock
    return times


def _cuda_rounds(device: torch.device) -> Callable[[Mapping[str, Job]], dict[str, float]]:
    buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def one_round(jobs: Mapping[str, Job]) -> dict[str, float]:
        marks = {}
        with torch.cuda.device(device):
            for name, job in jobs.items():
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                buffer.zero_()
                torch.cuda._sleep(HOLD_CYCLES)
                first.record()
                job()
                last.record()
                marks[name] = (first, last)
            torch.cuda.synchronize(device)
        return {name: float(first.elapsed_time(last)) for name, (first, last) in marks.items()}

    return one_round
