"""`mmfast bench --kernels segment-merge`: merging tokens, against what torch offers for it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.kernel_runs import (
    KINDS,
    bandwidth,
    over_cases,
    poisoned,
    timing,
    turns,
)
from mmfast.bench.timing import device_times
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Segments
from mmfast.ops.merging import segment_merge, segment_merge_reference

ROUNDS = 30
INPUTS = 3  # sets of rows that take turns: none is found in a cache
GOAL_US = 25  # the first case on an H200
_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # of the largest number
Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Entries of `items` merges of n rows onto m; `skew` above 0 makes few segments long ones."""

    name: str
    items: int
    n: int
    m: int
    width: int
    weighted: bool = False
    skew: float = 0.0

    def segments(self, device: str) -> Segments:
        """Every output has an entry; the others join at random."""
        shape = (self.items, self.n - self.m)
        joined = (torch.rand(shape) ** (1 + self.skew) * self.m).long().clamp_max(self.m - 1)
        own = torch.arange(self.m).expand(self.items, -1)
        order = torch.rand(self.items, self.n).argsort(-1)
        owner = torch.cat([own, joined], -1).gather(-1, order).to(device)
        weight = torch.rand(owner.shape, device=device) if self.weighted else None
        return Segments(owner, self.m, weight=weight, mean=not self.weighted)


CUDA_CASES = (
    Case("mean of 6,272 onto 1,568 tokens x 3,584", 1, 6272, 1568, 3584),
    Case("weights, 6,272 onto 1,568 x 3,584", 1, 6272, 1568, 3584, weighted=True),
    Case("long segments, 6,272 onto 1,568 x 3,584", 1, 6272, 1568, 3584, skew=2.0),
    Case("mean of 6,272 onto 627 tokens x 3,584", 1, 6272, 627, 3584),
    Case("weights per head, 4 x 6,336 onto 1,584 x 128", 4, 6336, 1584, 128, weighted=True),
)
CPU_CASES = (
    Case("mean of 784 onto 196 tokens x 896", 1, 784, 196, 896),
    Case("weights, 784 onto 196 x 896", 1, 784, 196, 896, weighted=True),
    Case("weights per head, 2 x 792 onto 198 x 64", 2, 792, 198, 64, weighted=True),
)


def rows(tick: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Measure every case on CUDA where there is one, tiny ones on the CPU elsewhere.

    Returns:
        A row per case and way: milliseconds, `speedup` over `index_add_` in float32, `repeatable`
        (the same bits five times), `max_error` against float64 as a share of the largest number,
        and on CUDA `gb_s` of the rows read and written once, and what of a copy that is.

    Raises:
        MmfastError: A merge is wrong or not repeatable; nothing is timed then.
    """
    return over_cases({"cuda": CUDA_CASES, "cpu": CPU_CASES}, KINDS, _measured, tick)


def _measured(case: Case, kind: torch.dtype, device: str) -> list[dict[str, Any]]:
    torch.seed()  # other numbers each time
    segments = case.segments(device)
    inputs = [
        torch.randn(case.items, case.n, case.width, device=device).to(kind) for _ in range(INPUTS)
    ]
    ways = _ways(segments, device, kind)
    right = {name: _checked(name, way, inputs[0], segments) for name, way in ways.items()}
    turn = {name: turns(way, inputs) for name, way in ways.items()}
    times = device_times(turn, ROUNDS, device)
    base = statistics.median(times["index_add_ float32"])
    moved = case.items * (case.n + case.m) * case.width * kind.itemsize
    shape = {"items": case.items, "n": case.n, "m": case.m, "d": case.width}
    common = {"case": case.name, "device": device, "dtype": str(kind).removeprefix("torch.")}
    return [
        {**common, **shape, "way": name, **timing(mine), **right[name]}
        | {"speedup": base / statistics.median(mine)}
        | (bandwidth(moved, statistics.median(mine)) if device == "cuda" else {})
        for name, mine in times.items()
    ]


def _ways(segments: Segments, device: str, kind: torch.dtype) -> dict[str, Way]:
    """Our merge with its entries sorted already, as from the second use on, and what else is."""

    def fresh(x: Tensor) -> Tensor:
        again = Segments(segments.output, segments.m, None, segments.weight, segments.mean)
        return segment_merge(x, again)

    ways: dict[str, Way] = {"ours": lambda x: segment_merge(x, segments)}
    if device == "cuda":
        ways["ours and sorting"] = fresh
    ways["index_add_ float32"] = lambda x: _index_add(x, segments, torch.float32)
    if kind != torch.float32:
        ways["index_add_ same dtype"] = lambda x: _index_add(x, segments, kind)
    if device == "cuda":
        matrix = _matrix(segments).to(kind)
        ways["matrix product, matrix ready"] = lambda x: matrix @ x
    else:
        ways["formula float64"] = lambda x: segment_merge_reference(x, segments).to(x.dtype)
    return ways


def _index_add(x: Tensor, segments: Segments, kind: torch.dtype) -> Tensor:
    items, width = len(x), x.shape[-1]
    base = torch.arange(items, device=x.device)[:, None] * segments.m
    rows = x.reshape(-1, width).to(kind)
    if segments.weight is not None:
        rows = rows * segments.weight.view(-1, 1).to(kind)
    total = torch.zeros(items * segments.m, width, dtype=kind, device=x.device)
    total.index_add_(0, (segments.output + base).view(-1), rows)
    total = total.view(items, segments.m, width)
    return (total / segments.counts()[..., None] if segments.mean else total).to(x.dtype)


def _matrix(segments: Segments) -> Tensor:
    """Weights of all sources in all outputs, `[B, M, N]`."""
    weight = segments.weight
    share = torch.ones_like(segments.output, dtype=torch.float32) if weight is None else weight
    size = (*segments.output.shape[:-1], segments.m, segments.output.shape[-1])
    matrix = torch.zeros(size, device=share.device)
    matrix.scatter_(-2, segments.output[..., None, :], share[..., None, :])
    return matrix / segments.counts()[..., None] if segments.mean else matrix


def _checked(name: str, way: Way, x: Tensor, segments: Segments) -> dict[str, Any]:
    """Against float64; ours in memory that holds NaN before."""
    ours = name.startswith("ours")
    with poisoned() if ours else nullcontext():
        out = way(x)
        same = all(way(x).equal(out) for _ in range(5))
    expected = segment_merge_reference(x, segments)
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    if ours and (not error <= _ERROR[x.dtype] or not same):
        raise MmfastError(
            f"segment_merge is off by {error:.1e} of the largest number on {x.device.type}, "
            f"{'the same' if same else 'other bits'} every time; no speed is measured"
        )
    return {"max_error": error, "repeatable": same}
