"""Benchmarks of kernels against the operations that torch offers in their place.

Real sizes run on CUDA, tiny ones on the CPU; kernels with wrong results are not timed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from statistics import median
from typing import NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.bench.cases import textured_video
from mmfast.bench.registry import Tick, benchmark, collect
from mmfast.bench.results import Row, dtype_name
from mmfast.bench.stages import ceilings
from mmfast.bench.timing import device_times, extra_mb, one_thread, spread
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Segments
from mmfast.ops.max_min import max_min, max_min_plain, max_min_reference
from mmfast.ops.merging import segment_merge, segment_merge_reference
from mmfast.ops.pages import selected, selected_attention
from mmfast.ops.similarity import unit_rows
from mmfast.ops.temporal_difference import reference, static_runs, temporal_difference

T = TypeVar("T")
R = TypeVar("R")
DTYPES = {"cuda": (torch.bfloat16, torch.float32), "cpu": (torch.float32,)}
ONE_DTYPE = {"cuda": (torch.bfloat16,), "cpu": (torch.float32,)}
ROUNDS = 30
INPUTS = 3  # sets of inputs that take turns, so that none is found in a cache


class NamedCase(Protocol):
    """A case with a name."""

    @property
    def name(self) -> str:
        """Name in the rows and on the progress bar."""
        ...


C = TypeVar("C", bound=NamedCase)


def over_cases(
    cases: Mapping[str, Sequence[C]],
    dtypes: Mapping[str, Sequence[torch.dtype]],
    measure: Callable[[C, torch.dtype, str], list[Row]],
    tick: Tick,
) -> list[Row]:
    """Measure every case in every dtype: those of CUDA where there is a GPU, else of the CPU.

    IncompleteError, with the rows of the other cases, where some gave wrong results.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = [(case, dtype) for case in cases[device] for dtype in dtypes[device]]

    def rows(number: int, case: C, dtype: torch.dtype) -> list[Row]:
        tick(case.name, number, len(jobs))
        torch.seed()  # other numbers each time
        common = {"case": case.name, "device": device, "dtype": dtype_name(dtype)}
        return [{**common, **row} for row in measure(case, dtype, device)]

    with one_thread(), torch.no_grad():
        found = collect((each[0].name, partial(rows, i, *each)) for i, each in enumerate(jobs))
    tick("", len(jobs), len(jobs))
    return found


def in_turn(way: Callable[[T], R], inputs: Sequence[T]) -> Callable[[], R]:
    """Apply `way` to each of the inputs in turn, so that none is found in a cache."""
    calls = iter(range(1 << 62))
    return lambda: way(inputs[next(calls) % len(inputs)])


@contextmanager
def poisoned(*, warn_only: bool = False) -> Iterator[None]:
    """Fill fresh memory with NaN, as torch does in deterministic mode."""
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)


def _bandwidth(moved: int, ms: float, device: str) -> dict[str, float]:
    """Return the bandwidth that moves these bytes on a GPU, and its share of a copy's."""
    if device != "cuda":
        return {}
    reached = moved / ms / 1e6
    return {"gb_s": reached, "of_copy": reached / ceilings("cuda")["copy_gb_s"]}


_LOOPED = 20_000  # tokens up to which the loops over picks are measured too
_REFERENCE = 1000  # picks up to which the authors' loop is measured too
_STRIDE = 16  # of the tokens that the result is checked at, in float64


class PickCase(NamedTuple):
    """`items` videos of `grid` with features of width `d`, and `count` picks of each."""

    items: int
    grid: tuple[int, int, int]
    d: int
    picks: int
    goal_ms: float | None = None  # on an H200

    @property
    def n(self) -> int:
        """Tokens of an item."""
        return math.prod(self.grid)

    @property
    def name(self) -> str:
        """Sizes in words."""
        what = f"{self.picks:,} of {self.n:,} tokens x {self.d:,}"
        return f"{self.items} times {what}" if self.items > 1 else what


PICKS = {
    "cuda": (
        PickCase(1, (32, 14, 14), 3584, 627, 2.0),
        PickCase(1, (32, 14, 14), 3584, 1568, 4.0),
        PickCase(32, (1, 14, 14), 3584, 20, 0.2),
        PickCase(1, (256, 14, 14), 1024, 5000, 40.0),
    ),
    "cpu": (PickCase(1, (8, 8, 8), 64, 128), PickCase(8, (1, 14, 14), 64, 20)),
}


@benchmark("kernels", "max-min-select")
def max_min_select(tick: Tick) -> list[Row]:
    """Compare farthest-point selection with loops over picks.

    `speedup` is over the loop that keeps a running minimum, `cover` the worst token's cosine.
    """
    return over_cases(PICKS, ONE_DTYPE, _pick_rows, tick)


def _pick_rows(case: PickCase, dtype: torch.dtype, device: str) -> list[Row]:
    seed = torch.seed() % 2**31
    clips = [textured_video(case.grid, case.d, seed + item).x for item in range(case.items)]
    x = torch.stack(clips).to(device, dtype)  # [B, N, D]
    ways: dict[str, Callable[[], Tensor]] = {"ours": lambda: max_min(x, case.picks)}
    if case.n <= _LOOPED:
        ways["loop"] = lambda: _loop(x, case.picks)
    if case.items == 1 and case.picks <= _REFERENCE:
        ways["reference"] = lambda: max_min_reference(x[0], case.picks)[None]
    chosen = {name: way() for name, way in ways.items()}
    cover = {name: _cover(name, picks, x, case) for name, picks in chosen.items()}
    # Half precision rounds the loop's similarities, so that it picks other rows.
    if (behind := _behind(chosen["ours"], x)) > _PICK_ERROR:
        raise MmfastError(
            f"max_min_select picks a token whose cosine with the picks before it is {behind:.1e} "
            f"above the lowest one in {case.name!r}; no speed is measured"
        )
    times = device_times(ways, ROUNDS, device)
    base = median(times["loop"]) if "loop" in times else None
    common: Row = {"items": case.items, "n": case.n, "d": case.d, "budget": case.picks}
    common |= {"goal_ms": case.goal_ms if device == "cuda" else None}
    return [
        {**common, "way": name, **spread(times[name]), "cover": cover[name]}
        | {"speedup": base and base / median(times[name]), "extra_mb": extra_mb(way)}
        for name, way in ways.items()
    ]


def _loop(x: Tensor, count: int) -> Tensor:
    unit = unit_rows(x).to(x.dtype)
    similarity = unit @ unit.mT
    others = similarity.diagonal_scatter(torch.full_like(x[..., 0], -torch.inf), dim1=-2, dim2=-1)
    return max_min_plain(similarity, others.amax(-1).argmin(-1), count)


_PICK_ERROR = 1e-4  # of a cosine: sums of some thousand products in float32


def _behind(picks: Tensor, x: Tensor) -> float:
    """Return by how much, in float64, the worst pick is nearer to those before it than another."""
    worst = torch.zeros((), dtype=torch.float64, device=x.device)
    for tokens, order in zip(x, picks, strict=True):
        rows = unit_rows(tokens.double())
        nearest = rows @ rows[order[0]]
        nearest[order[0]] = torch.inf
        for at in range(1, len(order)):
            pick = order[at : at + 1]
            worst = torch.maximum(worst, nearest[pick][0] - nearest.amin())
            nearest = torch.maximum(nearest, rows @ rows[pick][0]).index_fill_(0, pick, torch.inf)
    return float(worst)


def _cover(name: str, picks: Tensor, x: Tensor, case: PickCase) -> float:
    """Return the worst token's cosine with its nearest pick, over a part of the tokens."""
    distinct = [len(set(item)) for item in picks.tolist()]
    if name == "ours" and min(distinct) < case.picks:
        raise MmfastError(f"max_min_select repeats picks at {case.n} tokens; no speed is measured")
    worst = 1.0
    for tokens, chosen in zip(x, picks, strict=True):
        nearest = unit_rows(tokens[::_STRIDE].double()) @ unit_rows(tokens[chosen].double()).T
        worst = min(worst, float(nearest.amax(-1).amin()))
    return worst


_MERGE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2**-7}  # of the largest number
Merge = Callable[[Tensor], Tensor]


class ReadCase(NamedTuple):
    """`m` of `n` entries of a cache that one token of each of `items` answers reads, by head."""

    items: int
    heads: int
    key_heads: int
    n: int
    m: int
    width: int

    @property
    def name(self) -> str:
        """Sizes in words."""
        return f"{self.m:,} of {self.n:,} entries x {self.heads} heads x {self.width}" + (
            f", {self.items} answers" if self.items > 1 else ""
        )


READS = {
    "cuda": (
        ReadCase(1, 14, 2, 16_384, 1638, 64),
        ReadCase(8, 14, 2, 16_384, 1638, 64),
        ReadCase(1, 28, 4, 131_072, 13_107, 128),
    ),
    "cpu": (ReadCase(1, 14, 2, 2048, 205, 64),),
}
_READ_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # largest difference of a result


@benchmark("kernels", "selected-attention")
def selected_reads(tick: Tick) -> list[Row]:
    """Compare attention to chosen entries with a gathered copy and with all entries.

    `speedup` is over the copy; `gb_s` on CUDA that of the chosen keys and values, read once.
    """
    return over_cases(READS, DTYPES, _read_rows, tick)


def _read_rows(case: ReadCase, dtype: torch.dtype, device: str) -> list[Row]:
    shape = case.items, case.key_heads, case.n
    inputs = [
        (
            torch.randn(case.items, case.heads, 1, case.width, device=device).to(dtype),
            *(torch.randn(*shape, case.width, device=device).to(dtype) for _ in range(2)),
            torch.rand(shape, device=device).argsort(-1)[..., : case.m].sort(-1).values,
        )
        for _ in range(INPUTS)
    ]
    ways: dict[str, Callable[[tuple[Tensor, ...]], Tensor]] = {
        "ours": lambda given: selected_attention(*given),
        "copy": lambda given: _on_copy(*given),
        "all entries": lambda given: selected_attention(*given[:3]),
    }
    error = float((ways["ours"](inputs[0]) - _exact(*inputs[0])).abs().max())
    if not error <= _READ_ERROR[dtype]:
        raise MmfastError(
            f"selected_attention is off by {error:.1e} in {case.name!r}; no speed is measured"
        )
    times = device_times({k: in_turn(way, inputs) for k, way in ways.items()}, ROUNDS, device)
    moved = 2 * case.items * case.key_heads * case.m * case.width * dtype.itemsize
    base = median(times["copy"])
    return [
        {"n": case.n, "budget": case.m, "d": case.width, "way": name, **spread(mine)}
        | {"max_error": error, "speedup": base / median(mine)}
        | (_bandwidth(moved, median(mine), device) if name == "ours" else {})
        for name, mine in times.items()
    ]


def _on_copy(query: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    copies = selected(keys, values, index)
    return F.scaled_dot_product_attention(query, *copies, enable_gqa=True)


def _exact(query: Tensor, keys: Tensor, values: Tensor, index: Tensor) -> Tensor:
    return _on_copy(query.double(), keys.double(), values.double(), index)


class MergeCase(NamedTuple):
    """`items` merges of n rows onto m; `skew` above 0 gives few outputs most of the rows."""

    name: str
    items: int
    n: int
    m: int
    width: int
    weighted: bool = False
    skew: float = 0.0

    def segments(self, device: str) -> Segments:
        """Give every output one row and distribute the others at random."""
        shape = (self.items, self.n - self.m)
        joined = (torch.rand(shape) ** (1 + self.skew) * self.m).long().clamp_max(self.m - 1)
        own = torch.arange(self.m).expand(self.items, -1)
        order = torch.rand(self.items, self.n).argsort(-1)
        owner = torch.cat([own, joined], -1).gather(-1, order).to(device)
        weight = torch.rand(owner.shape, device=device) if self.weighted else None
        return Segments(owner, self.m, weight=weight, mean=not self.weighted)


MERGES = {
    "cuda": (  # the first one takes 25 us at most on an H200
        MergeCase("mean of 6,272 onto 1,568 tokens x 3,584", 1, 6272, 1568, 3584),
        MergeCase("weights, 6,272 onto 1,568 x 3,584", 1, 6272, 1568, 3584, weighted=True),
        MergeCase("long segments, 6,272 onto 1,568 x 3,584", 1, 6272, 1568, 3584, skew=2.0),
        MergeCase("mean of 6,272 onto 627 tokens x 3,584", 1, 6272, 627, 3584),
        MergeCase("weights per head, 4 x 6,336 onto 1,584 x 128", 4, 6336, 1584, 128, True),
    ),
    "cpu": (
        MergeCase("mean of 784 onto 196 tokens x 896", 1, 784, 196, 896),
        MergeCase("weights, 784 onto 196 x 896", 1, 784, 196, 896, weighted=True),
        MergeCase("weights per head, 2 x 792 onto 198 x 64", 2, 792, 198, 64, weighted=True),
    ),
}


@benchmark("kernels", "segment-merge")
def segment_merges(tick: Tick) -> list[Row]:
    """Compare the merging of tokens with `index_add_` and a matrix product.

    `speedup` is over `index_add_` in float32, `repeatable` the same bits five times, `max_error` a
    share of the largest number, and on CUDA `gb_s` that of the rows read and written once.
    """
    return over_cases(MERGES, DTYPES, _merge_rows, tick)


def _merge_rows(case: MergeCase, dtype: torch.dtype, device: str) -> list[Row]:
    segments = case.segments(device)
    inputs = [
        torch.randn(case.items, case.n, case.width, device=device).to(dtype) for _ in range(INPUTS)
    ]
    ways = _merges(segments, device, dtype)
    checked = {name: _check_merge(name, way, inputs[0], segments) for name, way in ways.items()}
    jobs = {name: in_turn(way, inputs) for name, way in ways.items()}
    times = device_times(jobs, ROUNDS, device)
    base = median(times["index_add_ float32"])
    moved = case.items * (case.n + case.m) * case.width * dtype.itemsize
    shape = {"items": case.items, "n": case.n, "m": case.m, "d": case.width}
    return [
        {**shape, "way": name, **spread(mine), **checked[name], "speedup": base / median(mine)}
        | _bandwidth(moved, median(mine), device)
        for name, mine in times.items()
    ]


def _merges(segments: Segments, device: str, dtype: torch.dtype) -> dict[str, Merge]:
    """Return our merge with sorted entries, as from its second use on, and alternatives."""

    def fresh(x: Tensor) -> Tensor:
        again = Segments(segments.output, segments.m, None, segments.weight, segments.mean)
        return segment_merge(x, again)

    ways: dict[str, Merge] = {"ours": lambda x: segment_merge(x, segments)}
    if device == "cuda":
        ways["ours and sorting"] = fresh
    ways["index_add_ float32"] = lambda x: _index_add(x, segments, torch.float32)
    if dtype != torch.float32:
        ways["index_add_ same dtype"] = lambda x: _index_add(x, segments, dtype)
    if device == "cuda":
        matrix = _merge_matrix(segments).to(dtype)
        ways["matrix product, matrix ready"] = lambda x: matrix @ x
    else:
        ways["formula float64"] = lambda x: segment_merge_reference(x, segments).to(x.dtype)
    return ways


def _index_add(x: Tensor, segments: Segments, dtype: torch.dtype) -> Tensor:
    items, width = len(x), x.shape[-1]
    base = torch.arange(items, device=x.device)[:, None] * segments.m
    rows = x.reshape(-1, width).to(dtype)
    if segments.weight is not None:
        rows = rows * segments.weight.view(-1, 1).to(dtype)
    total = torch.zeros(items * segments.m, width, dtype=dtype, device=x.device)
    total.index_add_(0, (segments.output + base).view(-1), rows)
    total = total.view(items, segments.m, width)
    return (total / segments.counts()[..., None] if segments.mean else total).to(x.dtype)


def _merge_matrix(segments: Segments) -> Tensor:
    """Return the weights of all sources in all outputs, `[B, M, N]`."""
    weight = segments.weight
    share = torch.ones_like(segments.output, dtype=torch.float32) if weight is None else weight
    size = (*segments.output.shape[:-1], segments.m, segments.output.shape[-1])
    matrix = torch.zeros(size, device=share.device)
    matrix.scatter_(-2, segments.output[..., None, :], share[..., None, :])
    return matrix / segments.counts()[..., None] if segments.mean else matrix


def _check_merge(name: str, way: Merge, x: Tensor, segments: Segments) -> Row:
    """Compare with float64; ours is computed into memory that holds NaN."""
    ours = name.startswith("ours")
    with poisoned() if ours else nullcontext():
        out = way(x)
        same = all(way(x).equal(out) for _ in range(5))
    expected = segment_merge_reference(x, segments)
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    if ours and (not error <= _MERGE_ERROR[x.dtype] or not same):
        raise MmfastError(
            f"segment_merge is off by {error:.1e} of the largest number on {x.device.type}, "
            f"{'the same' if same else 'other bits'} every time; no speed is measured"
        )
    return {"max_error": error, "repeatable": same}


_PART = 64  # frames checked at once: all of a long clip in float64 would not fit in memory
_DIFFERENCE_ERROR = 4e-6  # float32 sums of some thousand terms; cosines are at most 1
_EAGER = {"all": "eager, all", "cosine": "eager, cosine"}


class DifferenceCase(NamedTuple):
    """Clips of `lengths` frames of n patches of width d."""

    name: str
    lengths: tuple[int, ...]
    n: int
    d: int


CLIPS = {
    "cuda": (
        DifferenceCase("32 frames x 196 x 3,584", (32,), 196, 3584),
        DifferenceCase("1,024 frames x 196 x 3,584", (1024,), 196, 3584),
        DifferenceCase("32 frames x 729 x 1,152", (32,), 729, 1152),
        DifferenceCase("4 clips of 8 to 64 frames x 196 x 3,584", (8, 64, 24, 32), 196, 3584),
    ),
    "cpu": (
        DifferenceCase("8 frames x 196 x 896", (8,), 196, 896),
        DifferenceCase("3 clips of 2 to 8 frames x 49 x 896", (8, 2, 6), 49, 896),
    ),
}


@benchmark("kernels", "temporal-difference")
def temporal_differences(tick: Tick) -> list[Row]:
    """Compare changes of patches between frames with eager torch (`speedup`) and compiled torch."""
    return over_cases(CLIPS, DTYPES, _difference_rows, tick)


def _difference_rows(case: DifferenceCase, dtype: torch.dtype, device: str) -> list[Row]:
    shape = (sum(case.lengths), case.n, case.d)
    inputs = [torch.randn(shape, device=device, dtype=dtype) for _ in range(INPUTS)]
    error = {"max_error": _check_difference(inputs[0], case)}
    jobs = {name: in_turn(way, inputs) for name, way in _differences(case, device).items()}
    times = device_times(jobs, ROUNDS, device)
    base = {what: median(times[way]) for what, way in _EAGER.items()}
    common = {"clips": len(case.lengths), "frames": shape[0], "n": case.n, "d": case.d}
    read = inputs[0].numel() * dtype.itemsize
    return [
        {**common, "way": way, **spread(mine)}
        | {"speedup": base["cosine" if "cosine" in way else "all"] / median(mine)}
        | (error if way.startswith("ours") else {})
        | _bandwidth(read, median(mine), device)
        for way, mine in times.items()
    ]


def _differences(case: DifferenceCase, device: str) -> dict[str, Callable[[Tensor], object]]:
    lengths = list(case.lengths)
    cosine: Merge = lambda x: F.cosine_similarity(x[1:], x[:-1], dim=-1)
    ways: dict[str, Callable[[Tensor], object]] = {
        "ours, all": lambda x: temporal_difference(x, lengths),
        "ours, cosine": lambda x: temporal_difference(x, lengths, l1=False),
        "ours, cosine and runs": lambda x: static_runs(
            temporal_difference(x, lengths, l1=False).cosine > 0.9
        ),
        _EAGER["all"]: lambda x: (cosine(x), (x[1:] - x[:-1]).abs().mean(-1), x.norm(dim=-1)),
        _EAGER["cosine"]: cosine,
    }
    if device == "cuda":
        # A process compiles a function for a limited number of shapes.
        torch.compiler.reset()
        ways["compiled, all"] = torch.compile(_fused, dynamic=False)
        ways["compiled, cosine"] = torch.compile(_fused_cosine, dynamic=False)
    return ways


def _fused(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    change = (x[1:].float() - x[:-1].float()).abs().mean(-1)
    return _fused_cosine(x), change, x.float().square().sum(-1).sqrt()


def _fused_cosine(x: Tensor) -> Tensor:
    now, before = x[1:].float(), x[:-1].float()
    scale = now.square().sum(-1) * before.square().sum(-1)
    return (now * before).sum(-1) / scale.sqrt()


def _check_difference(x: Tensor, case: DifferenceCase) -> float:
    """Return the largest error against float64, computed into memory full of NaN."""
    x[1, 0] = x[0, 0]
    with poisoned(warn_only=True):
        found = temporal_difference(x, case.lengths)
        runs = static_runs(found.cosine > 0.0)
    error = 0.0
    starts = accumulate(case.lengths[:-1], initial=0)
    for clip, start in zip(x.split([*case.lengths]), starts, strict=True):
        for first in range(0, len(clip), _PART):
            lead, end = min(first, 1), min(first + _PART, len(clip))
            expected = reference(clip[first - lead : end].double())
            for mine, other in zip(found, expected, strict=True):
                if mine is not None and other is not None:
                    part = mine[start + first : start + end]
                    error = max(error, _largest_error(part, other[lead:]))
    same = float(found.cosine[1, 0]) == 1.0
    counted = static_runs((found.cosine > 0.0).cpu()).equal(runs.cpu())
    if not error <= _DIFFERENCE_ERROR or not same or not counted:
        raise MmfastError(
            f"temporal_difference is off by {error:.1e} on {x.device.type}, equal rows "
            f"{'alike' if same else 'not alike'}, runs {'right' if counted else 'wrong'}; "
            "no speed is measured"
        )
    return error


def _largest_error(mine: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative above 1; NaN or a misplaced infinity shows."""
    off = (mine.double() - expected).abs() / expected.abs().clamp_min(1.0)
    off = torch.where(mine.double() == expected, 0.0, off)  # both infinite
    return float(off.nan_to_num(torch.inf).max())
