"""What a budget leaves of the first frame of a video."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.ranking import stable_topk
from mmfast.ops.spatial_novelty import spatial_novelty


def first_frame(x: Tensor, grid: tuple[int, int, int], budget: int) -> Tensor:
    """Places of the first frame that are kept, for methods that keep it and then only changes.

    The whole frame, if the budget holds it. Otherwise a quarter of the budget (rounded up; all of
    it for an image) goes to the tokens least like both the token on their left and the one above.
    Of the shares tried on the embedded model, from an eighth to two thirds, a quarter answered
    best at 10 %.

    Args:
        x: `[..., N, D]`.
        grid: Frames, rows and columns.
        budget: Tokens to keep of the whole video.

    Returns:
        `[..., share]` int64.
    """
    frames, rows, columns = grid
    n = rows * columns
    if budget >= n:
        return torch.arange(n, device=x.device).expand(*x.shape[:-2], n)
    share = budget if frames == 1 else (budget + 3) // 4
    return stable_topk(spatial_novelty(x[..., :n, :], rows, columns), share)
