"""Q-Filters: the direction that the queries of a head share."""

from __future__ import annotations

from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap


@policy("qfilter", paper="2503.02812", needs=("x", "query_filter"), role="score")
def qfilter(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the keys that reach furthest into the direction its queries share.

    Godey et al. (2025): the queries of a head point one way, whatever the prompt, so the projection
    of a key on that direction tells the attention it is to expect, with no query at hand. The
    direction is found once for a model by `mmfast.calibrate_heads`.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, as the cache holds them, and `query_filter` `[H, d]`, the
            first right singular vector of the queries of each head, towards their mean.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    way = tokens.need("query_filter").double().to(tokens.x.device)
    return snap((tokens.x.double() @ way[..., None]).squeeze(-1))
