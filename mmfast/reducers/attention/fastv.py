"""FastV: an image is worth half of its tokens after layer 2."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register("fastv", paper="2403.06764", needs=("attn",), sites=("llm", "pre"), layer=2, text=True)
def fastv(tokens: Tokens, budget: int) -> Reduction:
    """Keep the tokens that received most attention.

    Before decoder layer K that is the attention of layer K-1 from the last query token, mean over
    heads (Chen et al., ECCV 2024); before the LLM, the attention received in the vision tower.

    Args:
        tokens: `attn` of shape `[..., N]`.
        budget: Tokens to keep; ties go to the lowest index.
    """
    return Reduction.prune(stable_topk(tokens.need("attn"), budget), tokens.n)
