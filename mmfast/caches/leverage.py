"""Leverage: keys that the other keys cannot rebuild."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap
from mmfast.ops.similarity import leverage_scores


@policy("leverage", paper="2507.08143", needs=("x",), role="score")
def leverage(
    tokens: Tokens, budget: int, *, sink: int = 8, recent: int = 4, rank: int = 48, seed: int = 0
) -> Tensor:
    """Keep first and last tokens, and in each head the keys of the greatest leverage.

    The first half of Compactor of Chari & Van Durme (2025), which needs no query: the statistical
    leverage of a key is its squared length on the scale of the covariance of all keys, so it is
    large where few others point. A Gaussian projection of the channels makes it cheap.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, as the cache holds them.
        budget: Tokens to keep in every head; a share is of all tokens.
        sink: First tokens that stay, 8 as published, at most a quarter of the budget.
        recent: Last tokens that stay, 4 as published, at most a quarter of the budget.
        rank: Columns of the projection, 48 as published; 0, or no less than d, projects nothing.
        seed: Seed of the projection, one for all heads, made on the CPU.

    Raises:
        SpecError: A negative sink, recent or rank.
    """
    if min(sink, recent, rank) < 0:
        raise SpecError(
            f"knobs sink={sink}, recent={recent}, rank={rank} of 'leverage': choose 0 or more"
        )
    score = snap(leverage_scores(tokens.x, rank, seed))
    score[..., : min(sink, budget // 4)] = torch.inf
    score[..., tokens.n - min(recent, budget // 4) :] = torch.inf
    return score
