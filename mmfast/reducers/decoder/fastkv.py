"""FastKV: the full context up to one layer, its top tokens beyond."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import pooled_votes
from mmfast.ops.ranking import stable_topk


@register(
    "fastkv", paper="2502.01068", needs=("attn_window",), sites=("llm",), stages=(0.5,), text=True
)
def fastkv(tokens: Tokens, budget: int, *, kernel: int = 7) -> Reduction:
    """Keep at half depth the tokens that the last queries attend to, smoothed over neighbours.

    Token-selective propagation of Jo et al. (2025): one cut at half depth. The other half of the
    paper, which thins the cache of every layer by a rate of its own, is the cache policy of the
    same name; without it, layers before the cut keep all keys and values.

    Args:
        tokens: `attn_window` `[..., N]`, attention from the last 8 queries, mean over heads.
        budget: Tokens to keep; ties go to the lowest index.
        kernel: Neighbours in the mean, an odd number; at the ends only those that exist.
    """
    votes = pooled_votes(tokens.need("attn_window"), kernel, padded=False)
    return Reduction.prune(stable_topk(votes, budget), tokens.n)
