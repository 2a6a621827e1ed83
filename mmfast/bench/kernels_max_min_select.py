"""`mmfast bench --kernels max-min-select`: farthest points, against loops over picks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmfast.bench.kernel_runs import extra_mb, timing
from mmfast.bench.selection import video
from mmfast.bench.timing import device_times, one_thread
from mmfast.core.errors import MmfastError
from mmfast.ops.max_min import max_min, max_min_plain, max_min_reference
from mmfast.ops.similarity import unit_rows

ROUNDS = 30
_LOOPED = 20_000  # tokens up to which the loops over picks are measured too
_REFERENCE = 1000  # picks up to which the authors' loop is measured too
_STRIDE = 16  # of the tokens that the result is checked at, in float64


@dataclass(frozen=True)
class Case:
    """`items` videos of `grid` with features of width `d`, and `count` picks of each."""

    items: int
    grid: tuple[int, int, int]
    d: int
    count: int
    goal_ms: float | None = None  # on an H200

    @property
    def n(self) -> int:
        """Tokens of an item."""
        frames, rows, columns = self.grid
        return frames * rows * columns

    def tokens(self, device: str) -> Tensor:
        """`[B, N, D]`, other numbers each time."""
        seed = torch.seed() % 2**31
        kind = torch.bfloat16 if device == "cuda" else torch.float32
        clips = [video(self.grid, self.d, seed + item).x for item in range(self.items)]
        return torch.stack(clips).to(device, kind)


CUDA_CASES = (
    Case(1, (32, 14, 14), 3584, 627, 2.0),
    Case(1, (32, 14, 14), 3584, 1568, 4.0),
    Case(32, (1, 14, 14), 3584, 20, 0.2),
    Case(1, (256, 14, 14), 1024, 5000, 40.0),
)
CPU_CASES = (Case(1, (8, 8, 8), 64, 128), Case(8, (1, 14, 14), 64, 20))


def rows(tick: Callable[[str, int, int], None]) -> list[dict[str, Any]]:
    """Measure every case on CUDA where there is one, tiny ones on the CPU elsewhere.

    Returns:
        A row per case and way, products and first pick included: milliseconds, `speedup` over the
        loop that keeps a running minimum (None where nobody would wait for it), `cover`, the
        cosine of the worst covered token with its nearest pick, `goal_ms` on an H200 and
        `extra_mb` of memory above what was there before.

    Raises:
        MmfastError: Picks repeat, or do not cover the tokens as well as the loop's; nothing is
            timed then.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = CUDA_CASES if device == "cuda" else CPU_CASES
    found: list[dict[str, Any]] = []
    with one_thread():
        for number, case in enumerate(cases):
            tick(f"{case.items} x {case.n:,} tokens", number, len(cases))
            found += _measured(case, device)
    tick("", len(cases), len(cases))
    return found


def _measured(case: Case, device: str) -> list[dict[str, Any]]:
    x = case.tokens(device)
    ways = _ways(case, x)
    cover = {name: _checked(name, way(), x, case) for name, way in ways.items()}
    if "loop" in cover and abs(cover["ours"] - cover["loop"]) > 1e-3:
        raise MmfastError(
            f"max_min_select covers to {cover['ours']:.4f}, the loop to {cover['loop']:.4f}; "
            "no speed is measured"
        )
    times = device_times(ways, ROUNDS, device)
    base = median(times["loop"]) if "loop" in times else None
    what = f"{case.count:,} of {case.n:,} tokens x {case.d:,}"
    common = {
        "case": f"{case.items} times {what}" if case.items > 1 else what,
        "device": device,
        "dtype": str(x.dtype).removeprefix("torch."),
        "items": case.items,
        "n": case.n,
        "d": case.d,
        "budget": case.count,
        "goal_ms": case.goal_ms if device == "cuda" else None,
    }
    return [
        {**common, "way": name, **timing(times[name]), "cover": cover[name]}
        | {"speedup": base and base / median(times[name]), "extra_mb": extra_mb(way)}
        for name, way in ways.items()
    ]


def _ways(case: Case, x: Tensor) -> Mapping[str, Callable[[], Tensor]]:
    """Ours, the plain loop on the matrix of similarities, and the authors' one."""
    ways: dict[str, Callable[[], Tensor]] = {"ours": lambda: max_min(x, case.count)}
    if case.n <= _LOOPED:
        ways["loop"] = lambda: _loop(x, case.count)
    if case.items == 1 and case.count <= _REFERENCE:
        ways["reference"] = lambda: max_min_reference(x[0], case.count)[None]
    return ways


def _loop(x: Tensor, count: int) -> Tensor:
    unit = unit_rows(x).to(x.dtype)
    similarity = unit @ unit.mT
    others = similarity.diagonal_scatter(torch.full_like(x[..., 0], -torch.inf), dim1=-2, dim2=-1)
    return max_min_plain(similarity, others.amax(-1).argmin(-1), count)


def _checked(name: str, picks: Tensor, x: Tensor, case: Case) -> float:
    """The worst covered token's cosine with its nearest pick, over some of the tokens."""
    distinct = [len(set(item)) for item in picks.tolist()]
    if name == "ours" and min(distinct) < case.count:
        raise MmfastError(f"max_min_select repeats picks at {case.n} tokens; no speed is measured")
    worst = 1.0
    for tokens, chosen in zip(x, picks, strict=True):
        nearest = unit_rows(tokens[::_STRIDE].double()) @ unit_rows(tokens[chosen].double()).T
        worst = min(worst, float(nearest.amax(-1).amin()))
    return worst
