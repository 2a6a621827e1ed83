"""Votes for tokens, smoothed over neighbours."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.ops.ranking import stable_topk


def pooled_votes(score: Tensor, kernel: int, pool: str = "mean") -> Tensor:
    """Mean or maximum over the `kernel` places around each token.

    Args:
        score: `[..., N]`.
        kernel: An odd number; at the ends only the neighbours that exist count.
        pool: `mean` or `max`.

    Returns:
        `[..., N]` float64: sums of float32 votes are exact, so equal votes stay equal.

    Raises:
        SpecError: An even or negative kernel, or another pool.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise SpecError(f"knob kernel={kernel} is not odd; choose 1, 3, 5, 7 …")
    if pool not in ("mean", "max"):
        raise SpecError(f"unknown pool {pool!r}; choices: max, mean")
    rows, side = score.double().reshape(-1, 1, score.shape[-1]), kernel // 2
    if pool == "max":
        return F.max_pool1d(rows, kernel, stride=1, padding=side).view(score.shape)
    means = F.avg_pool1d(rows, kernel, stride=1, padding=side, count_include_pad=False)
    return means.view(score.shape)


def window_choice(
    attn: Tensor, budget: int, *, window: int, kernel: int, pool: str = "mean"
) -> Reduction:
    """Keep the last tokens, and before them what they vote for.

    Args:
        attn: `[..., H, N]` attention of the last `window` queries.
        budget: Tokens to keep in each head.
        window: Last tokens that stay, or half of the budget where that is less: a small cache
            of nothing but the question would be of no use.
        kernel: Neighbours in the pooled votes; see `pooled_votes`.
        pool: `mean` or `max`.

    Raises:
        SpecError: The window is empty, or as in `pooled_votes`.
    """
    if window < 1:
        raise SpecError(f"knob window={window} holds no query; choose 1 or more")
    n = attn.shape[-1]
    last = min(window, max(budget // 2, 1))
    votes = pooled_votes(attn[..., : n - last], kernel, pool)
    return with_last(stable_topk(votes, budget - last), last, n)


def with_last(chosen: Tensor, last: int, n: int) -> Reduction:
    """Keep the tokens `chosen` `[..., K]`, all before the last ones, and the last ones."""
    tail = torch.arange(n - last, n, device=chosen.device).expand(*chosen.shape[:-1], -1)
    return Reduction.prune(torch.cat([chosen, tail], -1), n)
