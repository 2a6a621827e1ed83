"""VisionDrop: rank visual tokens by what other visual tokens attend to."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.merging import context_count, contextual_merge
from mmfast.ops.ranking import stable_topk


@register(
    "visiondrop",
    paper="2506.22283",
    needs=("x", "attn_visual"),
    sites=("pre", "llm"),
    inner=("key_mean",),
    stages=(0.25, 0.5, 0.75),
)
def visiondrop(
    tokens: Tokens, budget: int, *, contextual: float = 0.2, parity: bool = False
) -> Reduction:
    """Keep the tokens that other visual tokens attend to most, and merge the rest into a few.

    The question is not used: inside a decoder its attention is biased towards late tokens and
    less and less tied to places (Xu et al., AAAI 2026). The same cut works before the language
    model and inside it, in stages with `visiondrop@llm:0.1`. The even spacing of the contextual
    targets, their share, and plain halves of target and joined mean are choices of this project.

    Args:
        tokens: `x` `[..., N, D]` and `attn_visual` `[..., N]`, attention received from visual
            tokens; likeness is the cosine of keys where they are given (`key_mean` of the layer
            before the cut), else of `x`.
        budget: Tokens to keep, dominant and contextual together.
        contextual: Share of contextual tokens below 1, or their number from 1.
        parity: Targets at multiples of `rest // contextual` (none in the tail), contextual tokens
            the sum of target and joined mean, emitted after the dominant ones, as the reference.
    """
    context = context_count(contextual, budget, "visiondrop")
    dominant = stable_topk(tokens.need("attn_visual"), budget - context)
    keys = tokens.signal("key_mean")
    metric = tokens.x if keys is None else keys
    return contextual_merge(dominant, metric, context, literal=parity)
