"""Merging of tokens into weighted means: segments, runs, neighbours, targets, pairs and boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Mix, Reduction, Segments, add_rows, gather_rows
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import complement, even_spots, snap, stable_topk
from mmfast.ops.similarity import nearest_rows, paired_cosine, unit_rows

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def segment_merge(x: Tensor, segments: Segments) -> Tensor:
    """Output m is the sum (or mean) of `weight * x[source]` over the entries of m: `[..., M, D]`.

    A sum is taken in float32 at least, 0 without entries. On CUDA one program adds up one output
    without atomics; float64 and gradients use plain torch.
    """
    learning = x.requires_grad and torch.is_grad_enabled()
    if not x.is_cuda or x.dtype not in _DTYPES or learning:
        return add_rows(x, segments)
    return _on_device(x, segments)


def _on_device(x: Tensor, segments: Segments) -> Tensor:
    from mmfast.kernels.segment_merge import segment_merge as kernel

    lead, ordered = x.shape[:-2], segments.ordered
    rows = x if x.stride(-1) == 1 else x.contiguous()

    def flat(entries: Tensor) -> Tensor:
        return entries.reshape(lead.numel(), -1)

    with torch.cuda.device_of(x):  # Triton launches where the thread is, not where the data is
        out: Tensor = kernel(
            rows.reshape(lead.numel(), *x.shape[-2:]),
            flat(ordered.offsets),
            flat(ordered.source),
            None if ordered.weight is None else flat(ordered.weight),
            mean=segments.mean,
        )
    return out.view(*lead, segments.m, x.shape[-1])


def segment_merge_reference(x: Tensor, segments: Segments) -> Tensor:
    """Merge by the whole matrix of weights `[..., M, K]` in float64: `[..., M, D]`."""
    outputs = torch.arange(segments.m, device=x.device)[:, None]
    share = (segments.output[..., None, :] == outputs).double()  # [..., M, K]
    if segments.mean:
        share = share / share.sum(-1, keepdim=True).clamp_min(1)
    if segments.weight is not None:
        share = share * segments.weight.double()[..., None, :]
    rows = x.double()
    if segments.source is not None:
        index = segments.source[..., None].expand(*segments.source.shape, x.shape[-1])
        rows = rows.gather(-2, index)
    return share @ rows


Integers = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


def adjacent_merge(metric: Tensor, budget: int | None, threshold: float) -> Reduction:
    """Merge similar neighbours of `[N, d]`, round after round, until `budget` runs are left.

    In a round runs at even places join the more similar of their two neighbours (the one before
    them on ties), the most similar pairs first, ties to the lowest place; a run has the mean of its
    tokens and the place of the middle one. Without a budget all above the cosine `threshold` merge.
    """
    wide = metric.double()
    total = torch.cat([wide.new_zeros(1, wide.shape[1]), wide.cumsum(0)])  # sums before each token
    starts = np.arange(len(wide))  # first token of each run
    while len(starts) > (budget or 1):
        ends = torch.from_numpy(np.append(starts, len(wide))).to(total.device)
        sums = total[ends].diff(dim=0)
        alike = snap(paired_cosine(sums[:-1], sums[1:])).cpu().numpy()  # run i with run i + 1
        gone = _joined(alike, None if budget is None else len(starts) - budget, threshold)
        if not len(gone):
            break
        starts = np.delete(starts, gone)
    return _runs(starts, len(wide), metric.device)


def _joined(alike: Floats, most: int | None, threshold: float) -> Integers:
    """Runs that end: those on the right of a merged border of `alike` `[R - 1]`."""
    padded = np.concatenate([[-np.inf], alike, [-np.inf]])
    before, after = padded[:-1:2], padded[1::2]  # cosine of even runs with their two neighbours
    best = np.maximum(before, after)
    order = np.argsort(-best, kind="stable")
    even = order[: int((best > threshold).sum()) if most is None else most]
    return np.where(before[even] >= after[even], 2 * even, 2 * even + 1)


def _runs(starts: Integers, n: int, device: torch.device) -> Reduction:
    ends = np.append(starts[1:], n)
    middle = torch.from_numpy((starts + ends - 1) // 2).to(device)
    lengths = torch.from_numpy(ends - starts).to(device)
    return Reduction.merge(middle, middle.repeat_interleave(lengths))


_STEP = 2.0**30  # cosines are compared in whole numbers of these
_CHUNK, _CHUNK_CUDA = 1 << 18, 1 << 25  # similarities held at once: 2 MB stay in cache


def neighbour_merge(
    attn: Tensor,
    keys: Tensor,
    listed: Tensor,
    rest: Tensor,
    *,
    neighbours: int = 32,
    raw: bool = False,
) -> Reduction:
    """Outputs for the listed tokens, and one summary of the others.

    A listed token becomes itself plus its nearest other tokens (cosine of keys), each weighted by
    its attention, `neighbours` at most; the summary is the attention-weighted sum of the rest, at
    the place of the most attended of them. Weights are then scaled to 1 in each output, but if
    `raw`: then they are 1 for the token itself, attention for the others. From `attn` `[..., N]`,
    `keys` `[..., N, d]`, `listed` `[..., m]` (one that is listed twice is its own neighbour and
    gives one output, which `order` names twice) and `rest` `[..., r]`, ascending, empty if `raw`
    at most: then the summary, last in the `order` of `listed`, is -1.

    Returns a Reduction with a mix. All tokens that are not listed are owned by the summary, if
    there is one, though listed ones may hold a part of them.
    """
    attn = attn.double()
    source, near = _neighbours(unit_rows(keys.double()), listed, rest, neighbours)
    weight = attn.gather(-1, near).unflatten(-1, (listed.shape[-1], -1)) if near.numel() else None
    scale = torch.ones_like(listed, dtype=torch.float64)
    if raw:  # a token listed twice is still one output
        scale = 1.0 - (listed[..., None] == listed[..., None, :]).tril(-1).any(-1).double()
    elif weight is not None:
        scale = 1 / (1 + weight.sum(-1))
    share = attn.gather(-1, rest)
    target, heaviest = torch.full_like(attn, -1, dtype=torch.int64), rest
    if rest.shape[-1]:
        heaviest = rest.gather(-1, share.argmax(-1, keepdim=True))
        target = heaviest.expand(target.shape).contiguous()
    keep = torch.cat([listed, heaviest], dim=-1)
    outputs = Reduction.merge(
        keep.unique() if listed.ndim == 1 else keep, target.scatter_(-1, listed, listed)
    )
    slots = outputs.owner.gather(-1, keep)
    own, last = slots[..., : listed.shape[-1]], slots[..., listed.shape[-1] :]
    if not raw:
        total = share.sum(-1, keepdim=True)
        share = torch.where(total > 0, share / total, 1 / rest.shape[-1])
    parts = [(own, listed, scale), (last.expand(rest.shape), rest, share)]
    if weight is not None:
        parts.append((own.gather(-1, source), near, (weight * scale[..., None]).flatten(-2)))
    mix = Mix(*(torch.cat(column, dim=-1) for column in zip(*parts, strict=True)))
    return replace(outputs, mix=mix, order=F.pad(slots, (0, 1 - last.shape[-1]), value=-1))


def _neighbours(rows: Tensor, listed: Tensor, rest: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Pairs of (place in `listed`, its neighbour), `[..., m * count]` each, for `most` or fewer."""
    n, m = rows.shape[-2], listed.shape[-1]
    candidates = torch.cat([listed, rest], dim=-1)  # [..., C]
    count = min(most, candidates.shape[-1] - 1)
    others = gather_rows(rows, candidates)
    place = torch.arange(m, device=rows.device)
    near: list[Tensor] = []
    at_once = _CHUNK_CUDA if rows.is_cuda else _CHUNK
    step = max(16, at_once // max(1, rows.shape[:-2].numel() * candidates.shape[-1]))
    for start in range(0, m, step):
        block = place[start : start + step]
        cosine = others[..., start : start + len(block), :] @ others.transpose(-1, -2)
        # Whole numbers with the index in the low digits: ties go to the lowest index everywhere.
        key = (cosine * _STEP).round().long() * n + (n - 1 - candidates)[..., None, :]
        key[..., torch.arange(len(block), device=rows.device), block] = torch.iinfo(key.dtype).min
        best = key.topk(count, dim=-1).indices  # [..., block, count]
        near.append(candidates[..., None, :].expand(key.shape).gather(-1, best).flatten(-2))
    source = place.repeat_interleave(count).expand(*listed.shape[:-1], -1)
    return source, torch.cat([source[..., :0], *near], dim=-1)


def contextual_merge(
    dominant: Tensor, metric: Tensor, count: int, *, literal: bool = False
) -> Reduction:
    """Every token that is not dominant joins the contextual target with the most similar metric.

    Targets are the middle ones of `count` equal runs of the remaining tokens, which 0 drops. A
    target that others joined is half of the result, their mean the other half. From `dominant`
    `[..., d]` without duplicates and `metric` `[..., N, w]` onto `d + c` tokens. `literal` is as
    the VisionZip reference: targets at multiples of `rest // c`, none in the tail, and both halves
    at full length; outputs are emitted in the order of `order`, dominant ones first.
    """
    n = metric.shape[-2]
    dominant = dominant.sort(dim=-1).values
    shape = (*dominant.shape[:-1], n)
    rest = complement(dominant, n)  # [..., R]
    spots = even_spots(count, rest.shape[-1], rest.device)
    if literal:
        spots = torch.arange(count, device=rest.device) * max(1, rest.shape[-1] // max(1, count))
    targets = rest[..., spots]  # [..., c]
    target = torch.arange(n, device=rest.device).expand(shape).contiguous()
    if count:
        joined = targets.gather(-1, _assign(metric, rest, targets))
        joined[..., spots] = targets
        target.scatter_(-1, rest, joined)
    else:
        target.scatter_(-1, rest, -1)
    kept = torch.cat([dominant, targets], dim=-1)
    merged = Reduction.merge(kept, target)
    weight = _weights(merged, target, 1.0 if literal else 0.5)
    order = merged.owner.gather(-1, kept) if literal else None
    return replace(merged, weight=weight, order=order)


def context_count(context: float, budget: int, method: str) -> int:
    """Number of contextual tokens in a budget: a share below 1, or a number from 1."""
    if not 0 <= context <= budget:
        raise SpecError(
            f"knob contextual={context} of {method!r} does not fit {budget} tokens; "
            f"choose a share from 0 to below 1 or a number from 1 to {budget}"
        )
    return int(context) if context >= 1 else round(context * budget)


def _assign(metric: Tensor, rest: Tensor, targets: Tensor) -> Tensor:
    """Number of the target with the most similar row for each remaining token, `[..., R]`."""
    rows = unit_rows(metric)
    return nearest_rows(gather_rows(rows, rest), gather_rows(rows, targets))


def _weights(merged: Reduction, target: Tensor, half: float) -> Tensor:
    """`half` for a target that others joined, `half` shared by those; at half 0.5 they sum to 1."""
    others = (merged.sizes() - 1).gather(-1, merged.owner.clamp_min(0))
    source = torch.arange(merged.n, device=target.device).expand_as(target)
    joined = half / others.clamp_min(1)
    own = torch.where(others > 0, half, 1.0)
    return torch.where(target == source, own, joined).masked_fill(target < 0, 0)


# Cosines this close to 1 differ by rounding only; as true ties they go to the lowest index.
_SAME = 1.0 - 2.0**-20


@dataclass(frozen=True)
class Matching:
    """Even tokens to merge: A position i is token 2 * i, B position j is token 2 * j + 1."""

    unmerged: Tensor  # `[..., a - r]` A positions that stay, most similar first
    source: Tensor  # `[..., r]` A positions that are merged, most similar first
    target: Tensor  # `[..., r]` the B position each of them joins


def match(
    metric: Tensor, count: int, *, class_token: bool = False, distill_token: bool = False
) -> Matching:
    """Choose the `count` even tokens of `[..., N, d]` most similar to an odd one."""
    rows = unit_rows(metric)
    even, odd = rows[..., ::2, :], rows[..., 1::2, :]
    partner = nearest_rows(even, odd, not_first=distill_token)  # [..., a]
    # Once more, row by row: equal pairs then have equal bits, and the lowest index wins.
    best = torch.linalg.vecdot(even, gather_rows(odd, partner)).clamp(max=_SAME)
    if class_token:
        best[..., 0] = -torch.inf
    rank = stable_topk(best, best.shape[-1])
    source, unmerged = rank[..., :count], rank[..., count:]
    if class_token:
        unmerged = unmerged.sort(dim=-1).values
    return Matching(unmerged, source, partner.gather(-1, source))


Box = tuple[int, ...]  # start and stop of frames, rows and columns


@lru_cache(maxsize=64)
def split_box(grid: tuple[int, int, int], count: int) -> tuple[Box, ...]:
    """Cut a grid into `count` boxes `(t0, t1, y0, y1, x0, x1)` of nearly equal volume."""
    done: list[Box] = []
    todo: list[tuple[Box, int]] = [((0, grid[0], 0, grid[1], 0, grid[2]), count)]
    while todo:
        box, share = todo.pop()
        if share == 1:
            done.append(box)
        else:
            todo.extend(_halve(box, share))
    return tuple(done)


def _halve(box: Box, share: int) -> tuple[tuple[Box, int], tuple[Box, int]]:
    """Cut the longest side (space before time) so that both parts can hold their cells."""
    sides = [box[1] - box[0], box[3] - box[2], box[5] - box[4]]
    axis = max((1, 2, 0), key=lambda a: sides[a])
    volume = sides[0] * sides[1] * sides[2]
    slab = volume // sides[axis]
    left = share // 2
    cut = min(max(round(sides[axis] * left / share), 1), sides[axis] - 1)
    # Rounding the cut may leave too little room on either side for its cells.
    left = min(max(round(share * cut / sides[axis]), share - (volume - cut * slab), 1), cut * slab)
    left = min(left, share - 1)
    start = box[2 * axis]
    first, second = list(box), list(box)
    first[2 * axis + 1] = second[2 * axis] = start + cut
    return (tuple(first), left), (tuple(second), share - left)


def refuse_block_knobs(method: str, reuse: int, until: float) -> None:
    """Refuse knobs about the blocks of an encoder where a method runs in front of them all."""
    for name, value, usual in (("reuse", reuse, 1), ("until", until, 1.0)):
        if value != usual:
            raise SpecError(
                f"knob {name}={value} of {method!r} is for site 'vit', where blocks follow each "
                f"other; write '{method}@vit:0.5?{name}={value}'"
            )


Cut = Callable[[tuple[int, int, int], int], Sequence[Box]]


def pool_boxes(tokens: Tokens, count: int, cut: Cut) -> Reduction:
    """Average every box that `cut(grid, count)` makes of the raster (without a grid a row)."""
    keep, target = _plan(tokens.grid or (1, 1, tokens.n), count, cut)
    lead, device = tokens.x.shape[:-2], tokens.x.device
    return Reduction.merge(
        keep.to(device).expand(*lead, -1).contiguous(),
        target.to(device).expand(*lead, -1).contiguous(),
    )


def box_numbers(grid: tuple[int, int, int], count: int) -> Tensor:
    """Number of each token's box, `[N]`, where `split_box` cuts a grid into `count` boxes."""
    numbers: Tensor = _plan(grid, count, split_box)[1].unique(return_inverse=True)[1]
    return numbers


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _plan(grid: tuple[int, int, int], count: int, cut: Cut) -> tuple[Tensor, Tensor]:
    """The middle token of each box, and the middle token that each token joins."""
    boxes = torch.tensor(list(cut(grid, count)))
    start, stop = boxes[:, ::2], boxes[:, 1::2]  # [M, 3]
    steps = torch.tensor([grid[1] * grid[2], grid[2], 1])
    middle = ((start + stop - 1) // 2 * steps).sum(-1)
    target = torch.full((grid[0] * grid[1] * grid[2],), -1)  # a hole would show as a dropped token
    sides = stop - start
    size = sides.prod(-1)
    box = torch.arange(len(boxes)).repeat_interleave(size)
    inside = torch.arange(len(box)) - (size.cumsum(0) - size)[box]  # number of a token in its box
    rows, columns = sides[box, 1], sides[box, 2]
    offset = torch.stack(
        [inside // (rows * columns), inside // columns % rows, inside % columns], 1
    )
    target[((start[box] + offset) * steps).sum(-1)] = middle[box]
    return middle, target
