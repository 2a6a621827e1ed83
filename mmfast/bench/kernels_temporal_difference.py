"""`mmfast bench --kernels temporal-difference`: changes of patches, against what torch offers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
from mmfast.ops.temporal_difference import (
    Difference,
    reference,
    static_runs,
    temporal_difference,
)

ROUNDS = 30
INPUTS = 3  # clips that take turns: none is found in a cache
GOAL_OF_COPY = 0.70  # of a copy's bandwidth, the clip counted as read once
_PART = 64  # frames checked at once: float64 of a long clip is more than there is memory
_ERROR = 4e-6  # float32 sums of some thousand terms; cosines are at most 1
_EAGER = {"all": "eager, all", "cosine": "eager, cosine"}
Way = Callable[[Tensor], object]


@dataclass(frozen=True)
class Case:
    """Clips of `lengths` frames of n patches of width d."""

    name: str
    lengths: tuple[int, ...]
    n: int
    d: int


CUDA_CASES = (
    Case("32 frames x 196 x 3,584", (32,), 196, 3584),
    Case("1,024 frames x 196 x 3,584", (1024,), 196, 3584),
    Case("32 frames x 729 x 1,152", (32,), 729, 1152),
    Case("4 clips of 8 to 64 frames x 196 x 3,584", (8, 64, 24, 32), 196, 3584),
)
CPU_CASES = (
    Case("8 frames x 196 x 896", (8,), 196, 896),
    Case("3 clips of 2 to 8 frames x 49 x 896", (8, 2, 6), 49, 896),
)


def rows(tick: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Measure every case on CUDA where there is one, tiny ones on the CPU elsewhere.

    Returns:
        A row per case and way: milliseconds, `speedup` over eager torch with the same results,
        and on CUDA `gb_s` of the clip read once, and what of a copy that is. The rows of ours
        have `max_error` against float64.

    Raises:
        MmfastError: A difference is wrong; nothing is timed then.
    """
    with torch.no_grad():
        return over_cases({"cuda": CUDA_CASES, "cpu": CPU_CASES}, KINDS, _measured, tick)


def _measured(case: Case, kind: torch.dtype, device: str) -> list[dict[str, Any]]:
    torch.seed()  # other numbers each time
    shape = (sum(case.lengths), case.n, case.d)
    inputs = [torch.randn(shape, device=device, dtype=kind) for _ in range(INPUTS)]
    error = _checked(inputs[0], case)
    jobs = {name: turns(way, inputs) for name, way in _ways(case, device).items()}
    times = device_times(jobs, ROUNDS, device)
    base = {what: statistics.median(times[way]) for what, way in _EAGER.items()}
    common: dict[str, Any] = {"case": case.name, "device": device}
    common |= {"dtype": str(kind).removeprefix("torch."), "clips": len(case.lengths)}
    common |= {"frames": shape[0], "n": case.n, "d": case.d}
    read = inputs[0].numel() * kind.itemsize
    result: list[dict[str, Any]] = []
    for way, mine in times.items():
        middle = statistics.median(mine)
        row = {**common, "way": way, **timing(mine)}
        row["speedup"] = base["cosine" if "cosine" in way else "all"] / middle
        if way.startswith("ours"):
            row["max_error"] = error
        if device == "cuda":
            row |= bandwidth(read, middle)
        result.append(row)
    return result


def _ways(case: Case, device: str) -> dict[str, Way]:
    """All three results, or the cosine alone: ours, eager torch, and compiled on a GPU."""
    lengths = list(case.lengths)
    ways: dict[str, Way] = {
        "ours, all": lambda x: temporal_difference(x, lengths),
        "ours, cosine": lambda x: temporal_difference(x, lengths, l1=False),
        "ours, cosine and runs": lambda x: static_runs(
            temporal_difference(x, lengths, l1=False).cosine > 0.9
        ),
        _EAGER["all"]: _eager,
        _EAGER["cosine"]: lambda x: F.cosine_similarity(x[1:], x[:-1], dim=-1),
    }
    if device == "cuda":
        # A process compiles for few shapes before it gives up on a function.
        torch.compiler.reset()
        ways["compiled, all"] = torch.compile(_fused, dynamic=False)
        ways["compiled, cosine"] = torch.compile(_fused_cosine, dynamic=False)
    return ways


def _eager(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cosine = F.cosine_similarity(x[1:], x[:-1], dim=-1)
    return cosine, (x[1:] - x[:-1]).abs().mean(-1), x.norm(dim=-1)


def _fused(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = x.float()
    change = (wide[1:] - wide[:-1]).abs().mean(-1)
    return _fused_cosine(x), change, wide.square().sum(-1).sqrt()


def _fused_cosine(x: Tensor) -> Tensor:
    now, before = x[1:].float(), x[:-1].float()
    scale = now.square().sum(-1) * before.square().sum(-1)
    return (now * before).sum(-1) / scale.sqrt()


def _checked(x: Tensor, case: Case) -> float:
    """Largest error against float64 over the whole clip, computed into memory full of NaN."""
    x[1, 0] = x[0, 0]
    with poisoned(warn_only=True):
        found = temporal_difference(x, case.lengths)
        runs = static_runs(found.cosine > 0.0)
    error = max(
        _off(mine[part], other[skip:])
        for part, skip, expected in _expected(x, case.lengths)
        for mine, other in zip(found, expected, strict=True)
        if mine is not None and other is not None
    )
    same = float(found.cosine[1, 0]) == 1.0
    counted = static_runs((found.cosine > 0.0).cpu()).equal(runs.cpu())
    if not error <= _ERROR or not same or not counted:
        raise MmfastError(
            f"temporal_difference is off by {error:.1e} on {x.device.type}, equal rows "
            f"{'alike' if same else 'not alike'}, runs {'right' if counted else 'wrong'}; "
            "no speed is measured"
        )
    return error


def _expected(x: Tensor, lengths: Iterable[int]) -> Iterator[tuple[slice, int, Difference]]:
    """Formulas in float64, some frames at a time: where they belong, and how many lead in."""
    begin = 0
    for length in lengths:
        for first in range(begin, begin + length, _PART):
            end = min(first + _PART, begin + length)
            lead = min(first - begin, 1)
            yield slice(first, end), lead, reference(x[first - lead : end].double())
        begin += length


def _off(mine: Tensor, expected: Tensor) -> float:
    """Largest difference, of numbers above 1 as a share; NaN or a misplaced infinity shows."""
    off = (mine.double() - expected).abs() / expected.abs().clamp_min(1.0)
    off = torch.where(mine.double() == expected, 0.0, off)  # both infinite
    return float(off.nan_to_num(torch.inf).max())
