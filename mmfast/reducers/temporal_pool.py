"""Pooling over time alone."""

from __future__ import annotations

from itertools import pairwise

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.cells import Box, split_box
from mmfast.ops.pooling import pool_boxes


@register("temporal_pool", paper="2503.04130", temporal=True)
def temporal_pool(tokens: Tokens, budget: int) -> Reduction:
    """Average the tokens of a place over runs of frames.

    Every place of the frame keeps its own tokens, as STORM pools over time (Jiang et al., 2025;
    there after temporal layers, which this does without). Places get equally many runs, give or
    take one, evenly spread, so that any budget is met; below one token a place all frames are
    averaged and neighbouring places share a token too.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame, a row of tokens.
        budget: Tokens to keep.
    """
    return pool_boxes(tokens, budget, _boxes)


def _boxes(grid: tuple[int, int, int], budget: int) -> list[Box]:
    frames, rows, columns = grid
    n = rows * columns
    if budget <= n:
        return [(0, frames, *cell[2:]) for cell in split_box((1, rows, columns), budget)]
    boxes: list[Box] = []
    for place in range(n):
        y, x = divmod(place, columns)
        runs = (place + 1) * budget // n - place * budget // n
        ends = [frames * run // runs for run in range(runs + 1)]
        boxes += [(a, b, y, y + 1, x, x + 1) for a, b in pairwise(ends)]
    return boxes
