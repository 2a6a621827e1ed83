"""GemFilter: a few layers read the whole prompt, then all layers read a short one."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import pooled_votes
from mmfast.ops.ranking import stable_topk


@register("gemfilter", paper="2409.17422", needs=("attn_ahead",), text=True)
def gemfilter(
    tokens: Tokens,
    budget: int,
    *,
    layer: int | None = None,
    kernel: int = 5,
    positions: str = "auto",
) -> Reduction:
    """Keep the tokens that the last query matches in a middle layer, and restart with them.

    Shi et al. (2024): the first layers run once over the full prompt without storing keys and
    values, then the model restarts from layer 0, so every layer and the whole cache are short.
    The first pass costs up to `layer` layers of the full prompt (its time is in the trace row).
    As in the authors' code a token counts by the product of query and key, summed over heads, mean
    over neighbours. Where text is dropped, what is left is counted anew, as in the paper; where
    media alone are, tokens stay at their original positions.

    Args:
        tokens: `attn_ahead` `[..., N]`, products of the last query with the keys in that layer.
        budget: Tokens to keep; ties go to the lowest index.
        layer: Decoder layer whose keys count; None is that at 0.4 of the depth.
        kernel: Neighbours in the mean, an odd number; at the ends only those that exist.
        positions: `new` counts what is left anew, `original` never does, `auto` where text is
            dropped in a model whose positions have one axis.
    """
    votes = pooled_votes(tokens.need("attn_ahead"), kernel, padded=False)
    return Reduction.prune(stable_topk(votes, budget), tokens.n)
