"""PTP, pyramid token pruning: regions, then tokens, corrected by the instruction."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, marked, one_by_one, rescale, share_out
from mmfast.ops.similarity import relevance
from mmfast.ops.video import regions


@register("ptp", paper="2509.15704", needs=("x", "attn", "query"))
def ptp(tokens: Tokens, budget: int, *, balance: float = 0.5) -> Reduction:
    """Spend the budget on salient regions first, inside them on salient and relevant tokens.

    Bottom-up saliency of region and token meets top-down relevance to the instruction (Liang et
    al., 2025). Regions are the tiles of an image; a video without tiles has its frames. That a
    region is as salient as the mean of its most attended quarter is a choice of this project
    (attention of a tower that runs on each tile sums to the same in all of them), as are the
    scales of saliency and relevance.

    Args:
        tokens: `x` `[..., N, D]`, `attn` `[..., N]`, `query` `[..., T, D]`, and `tile` `[..., N]`
            where there are tiles.
        budget: Tokens to keep.
        balance: Weight of saliency against relevance, from 0 to 1.
    """
    return one_by_one(lambda item: _prune(item, budget, balance), tokens)


def _prune(item: Tokens, budget: int, balance: float) -> Reduction:
    attn = item.need("attn").double()
    region = regions(item)
    size = region.bincount()
    top = grouped_topk(attn, region, (size + 3) // 4)
    share = torch.zeros(len(size), dtype=torch.float64, device=attn.device)
    share.index_add_(0, region[top], attn[top])
    counts = share_out(share / ((size + 3) // 4) * size, budget, size)
    relevant = rescale(relevance(item.x, item.need("query")))
    score = balance * rescale(attn) + (1 - balance) * relevant
    return Reduction.prune(marked(grouped_topk(score, region, counts)), item.n)
