"""FastKV: the full context up to one layer, its top tokens beyond."""

from __future__ import annotations

from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import stable_topk


@register("fastkv", paper="2502.01068", needs=("attn_window",), sites=("llm",), stages=(0.5,))
def fastkv(tokens: Tokens, budget: int, *, kernel: int = 7) -> Reduction:
    """Keep around the middle layer what the last few queries attend to, smoothed over neighbours.

    Token-selective propagation of Jo et al. (2025): one cut at half depth. The other half of the
    paper, which thins the cache of every layer by a rate of its own, is a cache policy and not
    part of this reducer: layers before the cut keep all keys and values.

    Args:
        tokens: `attn_window` `[..., N]`, attention from the last 8 queries, mean over heads.
        budget: Tokens to keep; ties go to the lowest index.
        kernel: Neighbours in the mean, an odd number; at the ends only those that exist.

    Raises:
        SpecError: An even or negative kernel.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise SpecError(f"knob kernel={kernel} of 'fastkv' is not odd; choose 1, 3, 5, 7 …")
    score = tokens.need("attn_window").float()
    rows = score.reshape(-1, 1, tokens.n)
    pooled = F.avg_pool1d(rows, kernel, stride=1, padding=kernel // 2, count_include_pad=False)
    return Reduction.prune(stable_topk(pooled.view(score.shape), budget), tokens.n)
