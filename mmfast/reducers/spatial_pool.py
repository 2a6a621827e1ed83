"""Pooling inside each frame."""

from __future__ import annotations

from itertools import pairwise

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.cells import Box, split_box
from mmfast.ops.pooling import pool_boxes


@register("spatial_pool", paper="2503.04130")
def spatial_pool(tokens: Tokens, budget: int) -> Reduction:
    """Average compact cells of each frame, never two frames together.

    Every frame keeps its own tokens, as STORM pools over space (Jiang et al., 2025; there after
    temporal layers, which this does without). Frames get equally many cells, give or take one,
    evenly spread, so that any budget is met; below one token a frame, neighbouring frames share
    one.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame, a row of tokens.
        budget: Tokens to keep.
    """
    return pool_boxes(tokens, budget, _boxes)


def _boxes(grid: tuple[int, int, int], budget: int) -> list[Box]:
    frames, rows, columns = grid
    if budget <= frames:
        ends = [frames * run // budget for run in range(budget + 1)]
        return [(a, b, 0, rows, 0, columns) for a, b in pairwise(ends)]
    boxes: list[Box] = []
    for t in range(frames):
        cells = (t + 1) * budget // frames - t * budget // frames
        boxes += [(t, t + 1, *cell[2:]) for cell in split_box((1, rows, columns), cells)]
    return boxes
