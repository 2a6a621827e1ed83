"""Average pooling onto any number of tokens."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.cells import split_box


@register("pool")
def pool(tokens: Tokens, budget: int) -> Reduction:
    """Average compact cells of neighbouring tokens in time and space.

    The box of frames, rows and columns is halved along its longest side until there are `budget`
    cells of nearly equal volume, so any budget is met exactly, not only divisors of the grid.

    Args:
        tokens: `x` of shape `[..., N, D]`; without a `grid` it is one row of tokens.
        budget: Number of cells. Each stands at the place of its middle token.
    """
    keep, target = _plan(tokens.grid or (1, 1, tokens.n), budget)
    lead, device = tokens.x.shape[:-2], tokens.x.device
    return Reduction.merge(
        keep.to(device).expand(*lead, -1).contiguous(),
        target.to(device).expand(*lead, -1).contiguous(),
    )


@lru_cache(maxsize=16)
def _plan(grid: tuple[int, int, int], count: int) -> tuple[Tensor, Tensor]:
    """The middle token of each cell, and the middle token that each token joins."""
    places = torch.arange(grid[0] * grid[1] * grid[2]).reshape(grid)
    target = torch.full_like(places, -1)  # a hole in the cells would show as a dropped token
    keep: list[int] = []
    for t0, t1, y0, y1, x0, x1 in split_box(grid, count):
        middle = int(places[(t0 + t1 - 1) // 2, (y0 + y1 - 1) // 2, (x0 + x1 - 1) // 2])
        keep.append(middle)
        target[t0:t1, y0:y1, x0:x1] = middle
    return torch.tensor(keep), target.flatten()
