"""What this machine can do at best: a copy and a matrix product, measured before anything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import torch
import torch.nn.functional as F

ROUNDS = 3
CPU_COPY_BYTES, CUDA_COPY_BYTES = 256 << 20, 1 << 30  # past every cache
PROBE_SIDE = 256
CPU_SIDE, CUDA_SIDE = 3072, 8192  # three matrices of 38 MB, of 134 MB
SLOW = 2.0  # seconds: a product estimated to take longer is measured on smaller matrices


def ceilings(device: torch.device | str, dtype: torch.dtype | None = None) -> dict[str, float]:
    """Copy bandwidth and matrix product of a device, the best of a few runs.

    Measured once per process, device, type and number of CPU threads.

    Args:
        device: `cpu` or `cuda`.
        dtype: Of the matrices; float32 on the CPU and bfloat16 on CUDA if None.

    Returns:
        `copy_gb_s`, gigabytes per second read plus written; `matmul_tflop_s`, 10^12 multiplies
        and adds per second.
    """
    where = torch.device(device)
    kind = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
    copy, product = _measured(str(where), kind, torch.get_num_threads())
    return {"copy_gb_s": copy, "matmul_tflop_s": product}


@cache
def _measured(device: str, dtype: torch.dtype, threads: int) -> tuple[float, float]:
    """(GB/s, TFLOP/s); `threads` only tells one setting of the CPU from another."""
    cuda = torch.device(device).type == "cuda"
    with torch.cuda.device(device) if cuda else nullcontext():
        return _copy(device, cuda), _product(device, dtype, cuda)


def _copy(device: str, cuda: bool) -> float:
    size = CUDA_COPY_BYTES if cuda else CPU_COPY_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best_seconds(lambda: target.copy_(source), cuda) / 1e9


def _product(device: str, dtype: torch.dtype, cuda: bool) -> float:
    """An emulated type would take minutes at full size: the size is what `SLOW` seconds allow."""
    side = PROBE_SIDE
    seconds = _product_seconds(side, device, dtype, cuda)
    affordable = int(side * (SLOW / seconds) ** (1 / 3))
    best = min(CUDA_SIDE if cuda else CPU_SIDE, affordable // side * side)
    if best > side:
        side, seconds = best, _product_seconds(best, device, dtype, cuda)
    return 2 * side**3 / seconds / 1e12


def _product_seconds(side: int, device: str, dtype: torch.dtype, cuda: bool) -> float:
    """By `linear`, as models multiply: bfloat16 on an old CPU is far slower by `mm`."""
    generator = torch.Generator(device=device).manual_seed(0)
    # Random, since a product of zeros draws less power and runs faster.
    a, b = torch.randn(2, side, side, device=device, generator=generator).to(dtype)
    return _best_seconds(lambda: F.linear(a, b), cuda)


def _best_seconds(job: Callable[[], object], cuda: bool) -> float:
    """Seconds of the fastest run; the first one, which warms up, does not count."""
    return min([_seconds(job, cuda) for _ in range(ROUNDS * 4 + 1 if cuda else ROUNDS + 1)][1:])


def _seconds(job: Callable[[], object], cuda: bool) -> float:
    if not cuda:
        # As `mmfast bench` times: on one thread by the processor, which other load leaves alone.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        job()
        return clock() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    job()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3
