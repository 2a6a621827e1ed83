"""HoliTom inside the LLM: merge what FastV would drop."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.nearest import nearest_rows
from mmfast.ops.ranking import stable_topk
from mmfast.ops.unit import unit_rows


@register("holitom_inner", paper="2505.21334", needs=("x", "attn"), sites=("llm",), layer=2)
def holitom_inner(tokens: Tokens, budget: int) -> Reduction:
    """Keep the most attended tokens and fold each other one into its most similar kept one.

    Tokens are folded in ascending order, each time halving what was there (Shao et al., NeurIPS
    2025): of c tokens joining a kept one, the last has weight 1/2, the one before 1/4, and the
    kept token itself 2^-c. The paper runs it before layer 18 of 28; the default layer is 2 so
    that it exists in small models.

    Args:
        tokens: `x` `[..., N, D]` and `attn` `[..., N]`.
        budget: Tokens to keep.
    """
    attn, n = tokens.need("attn"), tokens.n
    keep = stable_topk(attn, budget)  # [..., M], by rank: ties of similarity go to the best
    kept = torch.zeros(attn.shape, dtype=torch.bool, device=attn.device)
    kept.scatter_(-1, keep, torch.ones_like(keep, dtype=torch.bool))
    rest = kept.long().argsort(dim=-1, stable=True)[..., : n - budget]  # ascending
    rows = unit_rows(tokens.x)
    partner = nearest_rows(gather_rows(rows, rest), gather_rows(rows, keep))
    target = torch.arange(n, device=attn.device).expand(attn.shape).contiguous()
    target.scatter_(-1, rest, keep.gather(-1, partner))
    merged = Reduction.merge(keep, target)
    weight = _halvings(merged.owner, kept)
    return Reduction(merged.keep, merged.owner, weight=weight)


def _halvings(owner: Tensor, kept: Tensor) -> Tensor:
    """Weights `[..., N]` of repeated halving: 2^-(joins from this one on), 2^-joins if kept."""
    # Within each output: joined sources in ascending order, the kept one in front of them.
    n = owner.shape[-1]
    place = torch.arange(n, device=owner.device).expand_as(owner)
    key = owner * (n + 1) + torch.where(kept, 0, place + 1)
    order = key.argsort(dim=-1, stable=True)
    sorted_owner = owner.gather(-1, order)
    ends = torch.searchsorted(sorted_owner, sorted_owner, right=True)
    after = torch.empty_like(owner).scatter_(-1, order, ends - place)  # sources from here on
    return torch.exp2(-(after - kept.long()).float())
