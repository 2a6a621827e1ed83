"""Times of small jobs on one device: shuffled rounds, cold second-level cache, events on CUDA."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping

import torch

from mmfast.bench.measure import frozen, warm_up
from mmfast.core.errors import MmfastError

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
