"""PyramidKV: fewer tokens in each deeper layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import window_votes
from mmfast.ops.ranking import best_places, share_out


@policy(
    "pyramidkv",
    paper="2406.02069",
    needs=("attn_window", "depth", "depths"),
    role="score",
    uneven=True,
)
def pyramidkv(
    tokens: Tokens,
    budget: int,
    *,
    beta: float = 20.0,
    window: int = 8,
    kernel: int = 7,
    pool: str = "max",
) -> Reduction:
    """Keep as `snapkv` does, many tokens in the first layers and fewer in each deeper one.

    Cai et al. (2024): attention is spread in lower layers and gathers on few tokens in upper ones.
    Every layer keeps the window. What it keeps before that falls linearly with depth, to 1 / beta
    of the mean in the last layer, or less steeply where the first one cannot hold so much; in a
    prompt of less than twice that mean all layers keep equally many. All layers together keep
    exactly what equal budgets would.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, `attn_window` as for `snapkv`, and `depth` and `depths`,
            the number of the layer among those that are thinned, and how many there are.
        budget: Tokens to keep in every head, mean over the layers; a share is of all tokens.
        beta: The mean over the budget of the last layer, both before the window, 20 as published;
            1 has equal budgets.
        window: Queries of the observation window, at least 1, with at most half of the mean.
        kernel: Places that are pooled, an odd number.
        pool: `max` or `mean`.

    Raises:
        SpecError: A beta below 1.
    """
    if beta < 1:
        raise SpecError(f"knob beta={beta} of 'pyramidkv': choose 1 (equal budgets) or more")
    votes = tokens.need("attn_window")
    score = window_votes(votes, budget, window=window, kernel=kernel, pool=pool)
    last = int(score.isinf().sum(-1).flatten()[0])
    counts = last + budgets(budget - last, tokens.n - last, int(tokens.need("depths")), beta)
    mine = int(counts[int(tokens.need("depth"))])
    if mine == tokens.n:
        return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)
    return Reduction.prune(best_places(score, mine), tokens.n, ordered=True)


def budgets(mean: int, n: int, layers: int, beta: float) -> Tensor:
    """Tokens `[layers]` of each layer, of n, that fall with depth; their sum is exact."""
    top = float(min(2 * mean - mean // beta, n))
    if n < 2 * mean:
        top = mean
    slopes = torch.linspace(top, 2 * mean - top, layers, dtype=torch.float64)
    return share_out(slopes, mean * layers, torch.full((layers,), n))
