"""Keep dominant tokens and fold the rest into a few evenly spaced ones."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.ops.complement import complement
from mmfast.ops.even_spots import even_spots
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.nearest import nearest_rows
from mmfast.ops.unit import unit_rows


def contextual_merge(
    dominant: Tensor, metric: Tensor, count: int, *, literal: bool = False
) -> Reduction:
    """Every token that is not dominant joins the contextual target with the most similar metric.

    Targets are the middle ones of `count` equal runs of the remaining tokens. A target that others
    joined is half of the result, their mean the other half.

    Args:
        dominant: `[..., d]` tokens that stay as they are, no duplicates.
        metric: `[..., N, w]` features to compare.
        count: Number of targets c; 0 drops the remaining tokens.
        literal: As the VisionZip reference: targets at multiples of `rest // c`, none in the tail,
            and both halves at full length. Its outputs are emitted in the order of `order`,
            dominant ones first.

    Returns:
        A Reduction onto `d + c` tokens.
    """
    n = metric.shape[-2]
    dominant = dominant.sort(dim=-1).values
    shape = (*dominant.shape[:-1], n)
    rest = complement(dominant, n)  # [..., R]
    spots = even_spots(count, rest.shape[-1], rest.device)
    if literal:
        spots = torch.arange(count, device=rest.device) * max(1, rest.shape[-1] // max(1, count))
    targets = rest[..., spots]  # [..., c]
    target = torch.arange(n, device=rest.device).expand(shape).contiguous()
    if count:
        joined = targets.gather(-1, _assign(metric, rest, targets))
        joined[..., spots] = targets
        target.scatter_(-1, rest, joined)
    else:
        target.scatter_(-1, rest, -1)
    kept = torch.cat([dominant, targets], dim=-1)
    merged = Reduction.merge(kept, target)
    weight = _weights(merged, target, 1.0 if literal else 0.5)
    order = merged.owner.gather(-1, kept) if literal else None
    return replace(merged, weight=weight, order=order)


def context_count(context: float, budget: int, method: str) -> int:
    """Number of contextual tokens in a budget: a share below 1, or a number from 1.

    Raises:
        SpecError: The knob of `method` does not fit the budget.
    """
    if not 0 <= context <= budget:
        raise SpecError(
            f"knob contextual={context} of {method!r} does not fit {budget} tokens; "
            f"choose a share from 0 to below 1 or a number from 1 to {budget}"
        )
    return int(context) if context >= 1 else round(context * budget)


def _assign(metric: Tensor, rest: Tensor, targets: Tensor) -> Tensor:
    """For every remaining token the number of the target with the most similar row, `[..., R]`."""
    rows = unit_rows(metric)
    return nearest_rows(gather_rows(rows, rest), gather_rows(rows, targets))


def _weights(merged: Reduction, target: Tensor, half: float) -> Tensor:
    """`half` for a target that others joined, `half` shared by those; at half 0.5 they sum to 1."""
    others = (merged.sizes() - 1).gather(-1, merged.owner.clamp_min(0))
    source = torch.arange(merged.n, device=target.device).expand_as(target)
    joined = half / others.clamp_min(1)
    own = torch.where(others > 0, half, 1.0)
    return torch.where(target == source, own, joined).masked_fill(target < 0, 0)
