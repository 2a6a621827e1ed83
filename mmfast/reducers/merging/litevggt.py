"""LiteVGGT: tokens of edges stay, those of smooth places gather the rest."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import box_numbers, refuse_block_knobs
from mmfast.ops.ranking import grouped_topk, marked, one_by_one, rescale, share_out, snap
from mmfast.ops.similarity import nearest_rows, unit_rows


@register("litevggt", paper="2512.04939", sites=("pre", "vit"), scene=True)
def litevggt(
    tokens: Tokens,
    budget: int,
    *,
    salient: float = 0.3,
    first: bool = False,
    reuse: int = 1,
    until: float = 1.0,
) -> Reduction:
    """Keep tokens at edges as they are and merge the others into anchors in smooth places.

    A map of each frame, half the gradient and half the variance of its neighbourhood, tells where
    geometry is. In each frame the tokens highest on it never merge; the rest of the budget are
    anchors, the lowest token of each of as many boxes, and every other token joins the most similar
    anchor of the whole clip with equal weight (Shu et al., CVPR 2026).

    Args:
        tokens: `x` `[..., N, D]` in raster order of `grid`; without a grid a row. The map is that
            of `geometry` `[..., N]` where it is given, else of `x`.
        budget: Tokens to keep.
        salient: Share of the budget that never merges, 0 to below 1; the paper keeps a tenth of all
            tokens beside one anchor in each square of four, which is 0.29 of what is left.
        first: All tokens of the first frame are anchors, as published, where its camera sets the
            coordinates of the scene.
        reuse: At site `vit`, blocks that one plan serves; the authors make one at blocks 0, 6, 15
            and 20 of 24, to which 6 is near.
        until: At site `vit`, the share of the blocks that merge, the first ones.
    """
    refuse_block_knobs("litevggt", reuse, until)
    if not 0 <= salient < 1:
        raise SpecError(
            f"knob salient={salient} of 'litevggt' is no share of the budget; choose 0 to below 1"
        )

    def reduce(item: Tokens) -> Reduction:
        grid = item.grid or (1, 1, item.n)
        protected = min(round(salient * budget), budget - 1)
        boxes = budget - protected - (grid[1] * grid[2] if first else 0)
        if boxes < 0 or (first and grid[0] == 1):
            raise SpecError(
                f"'litevggt' with first=true keeps the {grid[1] * grid[2]} tokens of the first of "
                f"{grid[0]} frames and {protected} more, which do not fit {budget} of {item.n}; "
                "choose more tokens, or first=false"
            )
        known = item.signal("geometry")
        unit = unit_rows(item.x if known is not None else item.x.double())
        score = geometry(unit, grid) if known is None else known.double()
        anchor = _anchors(score, grid, boxes, first)
        frame = torch.arange(grid[0], device=unit.device).repeat_interleave(grid[1] * grid[2])
        free = frame[~anchor].bincount(minlength=grid[0])
        counts = share_out(free, protected, free)
        kept = grouped_topk(score.masked_fill(anchor, -1.0), frame, counts) | anchor
        places, joins = marked(anchor), marked(~kept)
        target = torch.arange(item.n, device=unit.device)
        target[joins] = places[nearest_rows(unit[joins], unit[places])]
        return Reduction.merge(marked(kept), target)

    return one_by_one(reduce, tokens)


def _anchors(score: Tensor, grid: tuple[int, int, int], boxes: int, first: bool) -> Tensor:
    """Mark the lowest of `score` `[N]` in each box, and all tokens of the `first` frame."""
    anchor = torch.zeros_like(score, dtype=torch.bool)
    skipped = grid[1] * grid[2] if first else 0
    anchor[:skipped] = True
    if boxes:
        box = box_numbers((grid[0] - first, *grid[1:]), boxes).to(score.device)
        one = torch.ones(boxes, dtype=torch.int64, device=score.device)
        anchor[skipped:] = grouped_topk(-score[skipped:], box, one)
    return anchor


# Part of the gradient of pixels, beside the variance of tokens, in the authors' code.
_OF_PIXELS = 0.7


def geometry(rows: Tensor, grid: tuple[int, int, int], grey: Tensor | None = None) -> Tensor:
    """Geometry that each token of `rows` `[N, D]` shows, `[N]` in float64 from 0 to 1.

    Half the length of the gradient (Sobel), half the variance in the 3 x 3 tokens about each (fewer
    at the border), both summed over channels and scaled to 0 to 1 in each frame of `grid`. With
    `grey` pictures `[T, H, W]` the gradient is theirs, the mean over the pixels of each token, and
    counts 0.7.
    """
    frames = rows.double().unflatten(0, grid).permute(0, 3, 1, 2)  # [T, D, h, w]
    part, drawn = (0.5, frames) if grey is None else (_OF_PIXELS, grey[:, None])
    squares = [_slope(drawn, *axes).square_().sum(1) for axes in ((-1, -2), (-2, -1))]
    gradient = snap(squares[0] + squares[1]).sqrt()  # [T, h, w], or [T, H, W]
    if grey is not None:
        gradient = F.adaptive_avg_pool2d(gradient, grid[1:])
    near = [F.avg_pool2d(f, 3, 1, 1, count_include_pad=False) for f in (frames, frames.square())]
    variance = snap((near[1] - near[0].square()).sum(1))
    maps = [rescale(each.flatten(1).double()) for each in (gradient, variance)]
    return (part * maps[0] + (1 - part) * maps[1]).flatten()


def _slope(x: Tensor, along: int, across: int) -> Tensor:
    """Sobel's slope along an axis of `x`; without padding, which in float64 takes room."""
    smooth = _shift(x, across, -1).add_(x, alpha=2).add_(_shift(x, across, 1))
    return _shift(smooth, along, 1).sub_(_shift(smooth, along, -1)).div_(8)


def _shift(x: Tensor, axis: int, step: int) -> Tensor:
    """The neighbour of each entry along an axis, itself at the end of it."""
    n = x.shape[axis]
    return x.index_select(axis, (torch.arange(n, device=x.device) + step).clamp(0, n - 1))
