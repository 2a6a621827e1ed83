"""FastKV: the cache is thinned at a rate of its own, by groups of query heads."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.pooled_votes import window_choice


@register(
    "fastkv",
    kind="cache",
    paper="2502.01068",
    needs=("attn_window",),
    sites=("kv",),
    role="score",
)
def fastkv(tokens: Tokens, budget: int, *, window: int = 8, kernel: int = 7) -> Reduction:
    """Keep in each group of query heads what the last few queries attend to, smoothed.

    The cache half of Jo et al. (2025): every layer keeps the same share, which does not depend on
    the share that the reducer of the same name lets through to deeper layers. Both together are
    `reduce="fastkv:0.2"` with `cache="fastkv:0.1"`.

    Args:
        tokens: Keys `x` `[..., H, N, d]` and `attn_window` `[..., H, N]`, the attention of the
            last `window` queries, mean over them and over the query heads of a key head.
        budget: Tokens to keep in every head, a share is of all tokens. The window is among them,
            with at most half of the budget.
        window: Queries at the end of the prompt; their own tokens stay.
        kernel: Places in the mean, an odd number; at the ends those that exist.

    Raises:
        SpecError: An even kernel or an empty window.
    """
    return window_choice(tokens.need("attn_window"), budget, window=window, kernel=kernel)
