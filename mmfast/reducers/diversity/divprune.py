"""DivPrune: keep the most diverse tokens."""

from __future__ import annotations

from dataclasses import replace

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.max_min import max_min, max_min_reference


@register("divprune", paper="2503.02175", sites=("pre", "llm"), text=True)
def divprune(tokens: Tokens, budget: int, *, parity: bool = False) -> Reduction:
    """Keep the subset whose closest two tokens are as far apart as greedy search gets them.

    Cosine distance; the first token is the one whose nearest neighbour is farthest away, every
    later one is the farthest from all before it (Alvar et al., CVPR 2025).

    Args:
        tokens: `x` of shape `[..., N, D]`.
        budget: Tokens to keep; ties go to the lowest index; tokens equal to a kept one come last.
        parity: Pick tokens again, as the reference does when fewer than `budget` tokens
            differ: repeats count, so fewer tokens may be left. `order` has them. One item, N >= 2.
    """
    if parity:
        picks = max_min_reference(tokens.x, budget)
        pruned = Reduction.prune(picks.unique(), tokens.n)
        return replace(pruned, order=pruned.owner[picks])
    return Reduction.prune(max_min(tokens.x, budget), tokens.n)
