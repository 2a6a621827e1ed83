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
