"""AdaptInfer: text attention weighted by the importance of each word."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register(
    "adaptinfer",
    paper="2508.06084",
    needs=("attn_text", "text_attn"),
    sites=("llm",),
    stages=(0.25, 0.5, 0.75),
)
def adaptinfer(tokens: Tokens, budget: int) -> Reduction:
    """Keep tokens by text attention, each text token weighted by the attention it receives.

    The score of an image token is the sum over text tokens of text-to-text attention received
    times text-to-image attention given, anew at every cut (Zhang et al., 2025). The paper places
    the cuts where cross-modal attention shifts, found offline for a model; the default depths
    are quarters, and `@llm<K>` places a cut by hand.

    Args:
        tokens: `attn_text` `[..., N, T]` and `text_attn` `[..., T]`.
        budget: Tokens to keep; ties go to the lowest index.
    """
    weight = tokens.need("text_attn").float()
    score = (tokens.need("attn_text").float() * weight[..., None, :]).sum(-1)  # [..., N]
    return Reduction.prune(stable_topk(score, budget), tokens.n)
