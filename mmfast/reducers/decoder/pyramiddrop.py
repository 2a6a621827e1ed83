"""PyramidDrop: fewer image tokens the deeper the layer."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register(
    "pyramiddrop",
    paper="2410.17247",
    needs=("attn",),
    sites=("llm",),
    stages=(0.25, 0.5, 0.75),
    text=True,
)
def pyramiddrop(tokens: Tokens, budget: int) -> Reduction:
    """Keep at each of several depths the tokens that the last query attends to most.

    Xing et al., CVPR 2025: the decoder is cut into four equal parts, and after each but the last
    a constant share of the image tokens goes. A spec without a site, `pyramiddrop:0.1`, does
    that and ends at its budget; `pyramiddrop@llm8:0.5` is one cut. The ranking reads the layer
    before the cut, where the paper projects queries and keys once more at the cut itself.

    Args:
        tokens: `attn` `[..., N]`, attention from the last query, mean over heads.
        budget: Tokens to keep; ties go to the lowest index.
    """
    return Reduction.prune(stable_topk(tokens.need("attn"), budget), tokens.n)
