"""A-ToMe: merge neighbours in time that sound alike."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.adjacent_merge import adjacent_merge
from mmfast.ops.one_by_one import one_by_one


@register("a_tome", paper="2306.16009", adaptive=True)
def a_tome(tokens: Tokens, budget: int | None, *, threshold: float = 0.85) -> Reduction:
    """Merge adjacent tokens of a sequence, the most similar first, into means of whole runs.

    Order in time stays, and steady sounds shrink while quick ones keep their frames (Li et al.,
    Interspeech 2023). Even tokens join the more similar of their two neighbours; rounds repeat on
    the means until `budget` are left, or until no neighbours are above `threshold`. The paper
    spreads such steps over the layers of an encoder; taking them all at once is a choice of this
    project.

    Args:
        tokens: `x` `[..., N, D]`, one sequence whatever its `grid`; likeness is the cosine of
            `keys` where they are given, else of `x`.
        budget: Tokens to keep; None merges by `threshold`.
        threshold: Cosine above which neighbours merge, without a budget.
    """

    def merge(item: Tokens) -> Reduction:
        keys = item.signal("keys")
        return adjacent_merge(item.x if keys is None else keys, budget, threshold)

    return one_by_one(merge, tokens)
