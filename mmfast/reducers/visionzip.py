"""VisionZip: dominant tokens, and contextual ones for the rest."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.nearest import nearest
from mmfast.ops.ranking import stable_topk
from mmfast.ops.unit import unit_rows


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
    context = _count(contextual, budget)
    attn, n = tokens.need("attn"), tokens.n
    dominant = stable_topk(attn, budget - context).sort(dim=-1).values  # [..., d]
    taken = torch.zeros(attn.shape, dtype=torch.bool, device=attn.device)
    taken.scatter_(-1, dominant, torch.ones_like(dominant, dtype=torch.bool))
    rest = taken.long().argsort(dim=-1, stable=True)[..., : n - budget + context]  # ascending
    spots = _spots(rest.shape[-1], context, parity).to(rest.device)
    targets = rest[..., spots]  # [..., c]
    target = torch.arange(n, device=rest.device).expand(attn.shape).contiguous()
    if context:
        joined = targets.gather(-1, _assign(tokens.need("keys"), rest, targets))
        joined[..., spots] = targets
        target.scatter_(-1, rest, joined)
    else:
        target.scatter_(-1, rest, -1)
    merged = Reduction.merge(torch.cat([dominant, targets], dim=-1), target)
    weight = _weights(merged, target, 1.0 if parity else 0.5)
    order = merged.owner.gather(-1, torch.cat([dominant, targets], dim=-1)) if parity else None
    return replace(merged, weight=weight, order=order)


def _count(contextual: float, budget: int) -> int:
    """Number of contextual tokens of a budget."""
    if not 0 <= contextual <= budget:
        raise SpecError(
            f"knob contextual={contextual} of 'visionzip' does not fit {budget} tokens; "
            f"choose a share from 0 to below 1 or a number from 1 to {budget}"
        )
    return int(contextual) if contextual >= 1 else round(contextual * budget)


def _spots(rest: int, context: int, parity: bool) -> Tensor:
    """Places of the targets among the remaining tokens."""
    step = torch.arange(context)
    if parity:
        return step * max(1, rest // max(1, context))
    return (2 * step + 1) * rest // (2 * max(1, context))  # the middle of equal runs


def _assign(keys: Tensor, rest: Tensor, targets: Tensor) -> Tensor:
    """For every remaining token the number of the target with the most similar key, `[..., R]`."""
    rows = unit_rows(keys)

    def take(index: Tensor) -> Tensor:
        return rows.gather(-2, index[..., None].expand(*index.shape, rows.shape[-1]))

    return nearest(take(rest) @ take(targets).transpose(-1, -2))


def _weights(merged: Reduction, target: Tensor, half: float) -> Tensor:
    """`half` for a target that others joined, `half` shared by those; at half 0.5 they sum to 1.

    The reference adds both parts at full length (`half` = 1).
    """
    others = (merged.sizes() - 1).gather(-1, merged.owner.clamp_min(0))
    source = torch.arange(merged.n, device=target.device).expand_as(target)
    joined = half / others.clamp_min(1)
    own = torch.where(others > 0, half, 1.0)
    return torch.where(target == source, own, joined).masked_fill(target < 0, 0)
