"""Redundancy of tokens in a graph of likeness."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.cosine_table import cosine_parts


def graph_redundancy(metric: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    """How well each token at an even place is covered by tokens at odd places.

    An edge joins an even and an odd token whose cosine is above `tau`. The redundancy of an even
    token is its degree times the mean cosine of its edges; without an edge it is its best cosine
    less one, so below that of any token with an edge.

    Args:
        metric: `[..., N, d]`, N >= 2.
        tau: At least 0.

    Returns:
        Redundancy and degree of the even tokens, `[..., ceil(N / 2)]` float64.
    """
    scores, degrees = [], []
    for table in cosine_parts(metric[..., ::2, :], metric[..., 1::2, :]):
        edges = table > tau
        degree = edges.sum(-1).double()
        best = table.amax(-1) - 1
        scores.append(table.mul_(edges).sum(-1).where(degree > 0, best))
        degrees.append(degree)
    return torch.cat(scores, -1), torch.cat(degrees, -1)
