"""HiPrune: anchors of a middle layer, their surroundings, and registers of a deep layer."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import index_mask, marked, one_by_one, stable_topk


@register("hiprune", paper="2508.00553", needs=("attn_visual", "attn_middle"))
def hiprune(tokens: Tokens, budget: int, *, alpha: float = 0.1, parity: bool = False) -> Reduction:
    """Keep tokens attended to by a middle layer with their neighbours, then those of a deep layer.

    Middle layers of a vision tower attend to objects, deep ones to tokens that gather the whole
    picture (Liu et al., 2025). A fifth of `alpha` of the budget are anchors, each with the tokens
    above, below, left and right of it; the rest are the most attended of the deep layer.

    Args:
        tokens: `attn_visual` (deep layer) and `attn_middle` `[..., N]`; without a `grid` the
            tokens are one row.
        budget: Tokens to keep.
        alpha: Share of the budget for anchors and their neighbours.
        parity: As the reference: neighbours run over row ends and are pulled back to the first
            and last token, anchors are excluded by subtracting 1.
    """
    if alpha < 0:
        raise SpecError(f"knob alpha={alpha} of 'hiprune' is negative; choose a share from 0 to 1")
    if parity:
        return one_by_one(lambda item: _as_reference(item, budget, alpha), tokens)
    deep = tokens.need("attn_visual").float()
    best = stable_topk(tokens.need("attn_middle"), min(round(budget * alpha / 5), budget // 5))
    _, rows, columns = tokens.grid or (1, 1, tokens.n)
    near = index_mask(_cross(best, rows, columns).flatten(-2), tokens.n)
    return Reduction.prune(stable_topk(deep.masked_fill(near, torch.inf), budget), tokens.n)


def _as_reference(item: Tokens, budget: int, alpha: float) -> Reduction:
    best = stable_topk(item.need("attn_middle"), round(budget * alpha / 5))
    columns = (item.grid or (1, 1, item.n))[2]
    around = best[:, None] + torch.tensor([0, -1, 1, -columns, columns], device=best.device)
    near = index_mask(around.clamp(0, item.n - 1).flatten(), item.n)
    left = budget - int(near.sum())
    if left < 0:
        kept = f"'hiprune' with parity=true keeps {budget - left} anchors and neighbours"
        raise SpecError(f"{kept}, above the budget {budget}; choose an alpha below {alpha}")
    registers = stable_topk(item.need("attn_visual").float() - near.float(), left)
    return Reduction.prune(marked(near | index_mask(registers, item.n)), item.n)


def _cross(centre: Tensor, rows: int, columns: int) -> Tensor:
    """Every centre with its neighbours in the frame, itself where there is none: `[..., A, 5]`."""
    y, x = centre // columns % rows, centre % columns
    left, right = centre - (x > 0).long(), centre + (x < columns - 1).long()
    up, down = centre - columns * (y > 0), centre + columns * (y < rows - 1)
    return torch.stack([centre, left, right, up, down], dim=-1)
