"""CriticalKV: what is attended to, and what of it moves the output of the layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import pooled_votes
from mmfast.ops.ranking import snap, stable_topk


@policy("criticalkv", paper="2502.03805", needs=("attn_window", "values_out"), role="score")
def criticalkv(
    tokens: Tokens,
    budget: int,
    *,
    window: int = 32,
    kernel: int = 7,
    pool: str = "max",
    first: float = 0.5,
    epsilon: float = 1e-4,
) -> Tensor:
    """Keep as `snapkv` does, half by votes alone and half by votes times what a value adds.

    Feng et al. (2025) bound the error that eviction makes in the output of attention: what a token
    adds is its attention times the length of its value behind the output projection. The first part
    of the budget goes to attention alone, which makes the bound hold.

    Args:
        tokens: Keys `x` `[..., H, N, d]`; `attn_window` as for `snapkv`; and `values_out`
            `[..., H, N]`, the sum of the magnitudes of what a value adds to the output of the layer
            at an attention of 1, mean over the query heads of a key head.
        budget: Tokens to keep in every head; a share is of all tokens. The window is among them,
            with at most half of the budget.
        window: Queries of the observation window, at least 1.
        kernel: Places that are pooled, an odd number.
        pool: `max` or `mean`.
        first: Part of the budget before the window that votes alone choose, half as published.
        epsilon: What is added to each vote in the second part.

    Raises:
        SpecError: A window of no query, `first` outside [0, 1], or a negative epsilon.
    """
    if window < 1 or not 0 <= first <= 1 or epsilon < 0:
        raise SpecError(
            f"knobs window={window}, first={first}, epsilon={epsilon} of 'criticalkv': choose "
            "a window of 1 or more, a part from 0 to 1, and 0 or more"
        )
    last = min(window, max(budget // 2, 1))
    before, room = tokens.n - last, budget - last
    votes = pooled_votes(tokens.need("attn_window")[..., :before], kernel, pool)
    score = snap((votes + epsilon) * tokens.need("values_out")[..., :before].double())
    score.scatter_(-1, stable_topk(votes, int(first * room)), torch.inf)
    return F.pad(score, (0, last), value=torch.inf)
