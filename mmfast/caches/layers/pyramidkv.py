"""PyramidKV: fewer tokens in each deeper layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import window_choice
from mmfast.ops.ranking import share_out


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
    Budgets fall linearly with depth, and the last layer has 1 / beta of the mean. All layers
    together keep exactly what equal budgets would: what a layer cannot hold the others take.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, `attn_window` as for `snapkv`, and `depth` and `depths`,
            the number of the layer among those that are thinned, and how many there are.
        budget: Tokens to keep in every head, mean over the layers; a share is of all tokens.
        beta: The mean over the budget of the last layer, 20 as published; 1 has equal budgets.
        window: Queries of the observation window, at least 1.
        kernel: Places that are pooled, an odd number.
        pool: `max` or `mean`.

    Raises:
        SpecError: A beta below 1.
    """
    if beta < 1:
        raise SpecError(f"knob beta={beta} of 'pyramidkv': choose 1 (equal budgets) or more")
    counts = budgets(budget, tokens.n, int(tokens.need("depths")), beta)
    mine = int(counts[int(tokens.need("depth"))])
    if mine == tokens.n:
        return Reduction.identity(tokens.n, tuple(tokens.x.shape[:-2]), tokens.x.device)
    votes = tokens.need("attn_window")
    return window_choice(votes, mine, window=window, kernel=kernel, pool=pool)


def budgets(mean: int, n: int, layers: int, beta: float) -> Tensor:
    """Tokens `[layers]` of each layer, from 1 to n, that fall with depth; their sum is exact."""
    slopes = torch.linspace(2 - 1 / beta, 1 / beta, layers, dtype=torch.float64)
    caps = torch.full((layers,), n - 1)
    return share_out(slopes, (mean - 1) * layers, caps) + 1
