"""Skip-Vision: most visual tokens pass the feed-forward layers by."""

from __future__ import annotations

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register("skip_vision", paper="2503.21817", needs=("attn_visual",), sites=("llm",), bypasses=True)
def skip_vision(tokens: Tokens, budget: int) -> Reduction:
    """Let feed-forward layers see those visual tokens alone that the others attend to most.

    Zeng et al., ICCV 2025: from decoder layer K on, tokens that are not kept take part in attention
    alone; when the prompt ends, their keys and values leave those layers. The last token of an
    image or clip, which has seen all the others, always stays and sums them up. The paper trains a
    model so, and ranks by the vision tower; here tokens are ranked by the attention they receive
    from the item in layer K-1, which works without training, and a model may be trained under it.

    Args:
        tokens: `attn_visual` `[..., N]`, attention from the item's own tokens, mean over heads.
        budget: Tokens that go through the feed-forward layers; ties go to the lowest index.
    """
    score = tokens.need("attn_visual").float().clone()
    score[..., -1] = float("inf")
    return Reduction.prune(stable_topk(score, budget), tokens.n)
