"""Average the tokens of boxes that cover a raster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens
from mmfast.ops.cells import Box

Cut = Callable[[tuple[int, int, int], int], Sequence[Box]]


def pool_boxes(tokens: Tokens, count: int, cut: Cut) -> Reduction:
    """Average every box that `cut(grid, count)` makes of the raster.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one row of tokens.
        count: Number of boxes. Each stands at the place of its middle token.
        cut: Boxes that cover every token once.
    """
    keep, target = _plan(tokens.grid or (1, 1, tokens.n), count, cut)
    lead, device = tokens.x.shape[:-2], tokens.x.device
    return Reduction.merge(
        keep.to(device).expand(*lead, -1).contiguous(),
        target.to(device).expand(*lead, -1).contiguous(),
    )


@lru_cache(maxsize=16)
def _plan(grid: tuple[int, int, int], count: int, cut: Cut) -> tuple[Tensor, Tensor]:
    """The middle token of each box, and the middle token that each token joins."""
    places = torch.arange(grid[0] * grid[1] * grid[2]).reshape(grid)
    target = torch.full_like(places, -1)  # a hole in the boxes would show as a dropped token
    keep: list[int] = []
    for t0, t1, y0, y1, x0, x1 in cut(grid, count):
        middle = int(places[(t0 + t1 - 1) // 2, (y0 + y1 - 1) // 2, (x0 + x1 - 1) // 2])
        keep.append(middle)
        target[t0:t1, y0:y1, x0:x1] = middle
    return torch.tensor(keep), target.flatten()
