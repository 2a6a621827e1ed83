"""Ranking by score with a defined order of ties."""

from __future__ import annotations

from torch import Tensor


def stable_topk(score: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, best first; ties go to the lowest index.

    Args:
        score: `[..., N]`.
        count: How many, at most N.

    Returns:
        `[..., count]` int64. `torch.topk` leaves the order of ties open, and CPU and CUDA differ.
    """
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]
