"""The best few of every group at once: of every frame, tile or image."""

from __future__ import annotations

import torch
from torch import Tensor


def grouped_topk(score: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts[g]` highest scores of each group g; ties go to the lowest index.

    Args:
        score: `[..., N]`.
        group: `[..., N]` int64 in `[0, G)`, in any order.
        counts: `[..., G]` int64, at most as many as the group has; 0 takes none.

    Returns:
        `[..., N]` bool; `marked` turns it into indices.
    """
    score, group = torch.broadcast_tensors(score, group)
    counts = counts.expand(*score.shape[:-1], counts.shape[-1])
    best = score.sort(dim=-1, descending=True, stable=True).indices
    # A second stable sort brings groups together and leaves the best of each in front.
    sorted_group, place = group.gather(-1, best).sort(dim=-1, stable=True)
    order = best.gather(-1, place)
    start = torch.searchsorted(sorted_group.contiguous(), sorted_group.contiguous())
    rank = torch.arange(score.shape[-1], device=score.device) - start
    return torch.zeros_like(score, dtype=torch.bool).scatter_(
        -1, order, rank < counts.gather(-1, sorted_group)
    )


def marked(mask: Tensor) -> Tensor:
    """Ascending indices `[..., M]` of the True entries of `mask` `[..., N]`, M in every row."""
    return mask.nonzero()[:, -1].reshape(*mask.shape[:-1], -1)
