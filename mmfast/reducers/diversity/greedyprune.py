"""GreedyPrune: salient tokens that do not resemble each other."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.max_min import greedy_diverse
from mmfast.ops.ranking import one_by_one, rescale


@register("greedyprune", paper="2506.13166", needs=("x", "attn"), sites=("pre", "llm"))
def greedyprune(tokens: Tokens, budget: int, *, balance: float = 0.5) -> Reduction:
    """Pick tokens one by one by high attention and low similarity to the picks before.

    Saliency and diversity are one combinatorial problem, solved greedily (Pei et al., 2025).
    That saliency is scaled to [0, 1], likeness is the largest cosine with a pick, and both count
    half by default are choices of this project.

    Args:
        tokens: `x` `[..., N, D]` and `attn` `[..., N]`.
        budget: Tokens to keep.
        balance: Weight of saliency, from 0 (diversity alone) to 1 (attention alone).
    """

    def prune(item: Tokens) -> Reduction:
        picks = greedy_diverse(rescale(item.need("attn")), item.x, budget, balance)
        return Reduction.prune(picks, item.n)

    return one_by_one(prune, tokens)
