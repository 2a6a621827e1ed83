"""AdaptInfer: text attention weighted by the importance of each word."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register(
    "adaptinfer",
    paper="2508.06084",
    needs=("attn_mutual",),
    sites=("llm",),
    stages=(0.25, 0.5, 0.75),
)
def adaptinfer(tokens: Tokens, budget: int) -> Reduction:
    """Keep tokens by text attention, each text token weighted by its attention to other text.

    The weight of a text token behind the image is what it gives to the other ones and gets from
    them, in each head; the score of an image token is the weighted sum of what these tokens give
    it, over all heads, anew at every cut (Zhang et al., 2025). The paper places
    the cuts where cross-modal attention shifts, found offline for a model; the default depths
    are quarters, and `@llm<K>` places a cut by hand.

    Args:
        tokens: `attn_mutual` `[..., N]`.
        budget: Tokens to keep; ties go to the lowest index.
    """
    return Reduction.prune(stable_topk(tokens.need("attn_mutual"), budget), tokens.n)
