"""Average pooling onto any number of tokens."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import Box, pool_boxes, split_box


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
    frames, rows, columns = tokens.grid or (1, 1, tokens.n)
    if budget <= rows * columns:
        return pool_boxes(tokens, budget, _columns)
    lead, device = tokens.x.shape[:-2], tokens.x.device
    keep, target = (
        plan.to(device).expand(*lead, -1).contiguous()
        for plan in _runs(frames, rows * columns, budget)
    )
    return Reduction.merge(keep, target)


def _columns(grid: tuple[int, int, int], budget: int) -> list[Box]:
    frames, rows, columns = grid
    return [(0, frames, *cell[2:]) for cell in split_box((1, rows, columns), budget)]


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _runs(frames: int, n: int, budget: int) -> tuple[Tensor, Tensor]:
    """The middle token of each run of frames, `[budget]`, and the one each token joins, `[N]`."""
    place = torch.arange(n)
    runs = (place + 1) * budget // n - place * budget // n  # of each place
    frame = torch.arange(frames)[:, None]
    run = ((frame + 1) * runs - 1) // frames  # the last that starts with this frame or before
    begin, end = frames * run // runs, frames * (run + 1) // runs
    target = ((begin + end - 1) // 2 * n + place).flatten()
    return target.unique(), target
