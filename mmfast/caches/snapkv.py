"""SnapKV: the end of the prompt says what of it is needed."""

from __future__ import annotations

from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import window_votes


@policy("snapkv", paper="2404.14469", needs=("attn_window",), role="score")
def snapkv(
    tokens: Tokens, budget: int, *, window: int = 32, kernel: int = 7, pool: str = "max"
) -> Tensor:
    """Keep in each head the last tokens and what they attend to, neighbours included.

    Li et al. (NeurIPS 2024): the queries of an observation window at the end of the prompt vote for
    the tokens before it, votes are pooled over neighbours so that details keep their surroundings,
    and the window itself always stays. Heads that share a key vote together.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_window` `[..., H, N]`, the attention of the last
            `window` queries, mean over them and over the query heads of a key head.
        budget: Tokens to keep in every head, a share is of all tokens. The window is among them,
            with at most half of the budget.
        window: Queries of the observation window, at least 1.
        kernel: Places that are pooled, an odd number; a mean counts those beyond the ends as 0.
        pool: `max` as published for long documents, or `mean`.
    """
    votes = tokens.need("attn_window")
    return window_votes(votes, budget, window=window, kernel=kernel, pool=pool)


@policy("fastkv", paper="2502.01068", needs=("attn_window",), role="score")
def fastkv(tokens: Tokens, budget: int, *, window: int = 8, kernel: int = 7) -> Tensor:
    """Keep in each group of query heads what the last few queries attend to, smoothed.

    The cache half of Jo et al. (2025): every layer keeps the same share, which does not depend on
    the share that the reducer of the same name lets through to deeper layers. Both together are
    `reduce="fastkv:0.2"` with `cache="fastkv:0.1"`.

    Args:
        tokens: Keys and `attn_window`, as for `snapkv`.
        budget: Tokens to keep in every head, as for `snapkv`.
        window: Queries at the end of the prompt, at least 1; their own tokens stay.
        kernel: Places in the mean, an odd number; those beyond the ends count as 0.
    """
    return window_votes(tokens.need("attn_window"), budget, window=window, kernel=kernel)
