"""FrameFusion: merge what stays the same from frame to frame, then prune by importance."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import index_mask, one_by_one, snap, stable_topk
from mmfast.ops.video import temporal_cosine


@register(
    "framefusion",
    paper="2501.01986",
    needs=("x", "attn_visual"),
    sites=("pre", "llm"),
    adaptive=True,
    temporal=True,
)
def framefusion(tokens: Tokens, budget: int | None, *, tau: float = 0.6) -> Reduction:
    """Merge tokens into the same place a frame before, then keep the most attended ones.

    Fu et al., ICCV 2025. Tokens whose cosine with the same place one frame before reaches `tau`
    join it, the most similar ones first, and a chain of them becomes one mean; what is then above
    the budget is pruned by the attention that tokens receive from all others. The paper merges in
    front of every decoder layer until less than a tenth of the tokens merges and prunes one layer
    later; here both happen in one cut, before the language model or inside it.

    Args:
        tokens: `x` `[..., N, D]` and `attn_visual` `[..., N]`; without a `grid` it is one frame.
        budget: Tokens to keep; None merges all that reach `tau` and prunes none.
        tau: Least cosine of a merge.
    """
    return one_by_one(lambda item: _fuse(item, budget, tau), tokens)


def _fuse(item: Tokens, budget: int | None, tau: float) -> Reduction:
    frames = 1 if item.grid is None else item.grid[0]
    n = item.n // frames
    alike = snap(temporal_cosine(item.x, frames).double()).flatten()  # [(T - 1) * n]
    many = int((alike >= tau).sum())
    many = many if budget is None else min(many, item.n - budget)
    merged = index_mask(n + stable_topk(alike, many), item.n)
    token = torch.arange(item.n, device=merged.device)
    first = token.masked_fill(merged, -1).unflatten(0, (frames, n)).cummax(0).values.flatten()
    keep = token[~merged]
    if budget is not None and len(keep) > budget:
        keep = keep[stable_topk(item.need("attn_visual")[keep], budget)]
        first = first.masked_fill(~index_mask(keep, item.n)[first], -1)
    if not many:
        return Reduction.prune(keep, item.n)
    return Reduction.merge(keep, first)
