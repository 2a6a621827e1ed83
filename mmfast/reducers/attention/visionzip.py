"""VisionZip: dominant tokens, and contextual ones for the rest."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import context_count, contextual_merge
from mmfast.ops.ranking import stable_topk


@register("visionzip", paper="2412.04467", needs=("x", "attn", "keys"))
def visionzip(
    tokens: Tokens, budget: int, *, contextual: float = 10 / 64, parity: bool = False
) -> Reduction:
    """Keep the most attended tokens and merge the rest into a few evenly spaced ones.

    Every remaining token joins the contextual target with the most similar key (Yang et al.,
    CVPR 2025). A contextual token is half its target and half the mean of what joined it, which
    is the direction of the reference at the length of an ordinary token.

    Args:
        tokens: `x` `[..., N, D]`, `attn` `[..., N]` and `keys` `[..., N, d]`.
        budget: Tokens to keep, dominant and contextual together.
        contextual: Share of contextual tokens below 1 (the published 54 + 10 by default), or
            their number from 1.
        parity: Targets at multiples of `rest // contextual` (none in the tail), contextual tokens
            twice as long, emitted after the dominant ones, as the reference does.
    """
    context = context_count(contextual, budget, "visionzip")
    dominant = stable_topk(tokens.need("attn"), budget - context)
    return contextual_merge(dominant, tokens.need("keys"), context, literal=parity)
