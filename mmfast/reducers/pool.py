"""Average pooling onto any number of tokens."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.cells import split_box
from mmfast.ops.pooling import pool_boxes


@register("pool")
def pool(tokens: Tokens, budget: int) -> Reduction:
    """Average compact cells of neighbouring tokens in time and space.

    The box of frames, rows and columns is halved along its longest side until there are `budget`
    cells of nearly equal volume, so any budget is met exactly, not only divisors of the grid.

    Args:
        tokens: `x` of shape `[..., N, D]`; without a `grid` it is one row of tokens.
        budget: Number of cells. Each stands at the place of its middle token.
    """
    return pool_boxes(tokens, budget, split_box)
