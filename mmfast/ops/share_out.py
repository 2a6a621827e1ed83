"""Share a whole number out among groups in proportion to weights, never above a cap."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError

_ROUNDING = 2.0**-30  # remainders this close differ by rounding only: a tie


def share_out(weights: Tensor, budget: int, caps: Tensor) -> Tensor:
    """Counts in proportion to `weights`, whole and at most `caps`, that sum to exactly `budget`.

    Largest remainder: every group gets its quota rounded down, and those with the largest
    fractions one more; ties go to the lowest index. What a full group cannot take goes to the
    others in the same proportion. Groups of weight 0 get something once all others are full, then
    in equal parts.

    Args:
        weights: `[..., G]`, 0 or positive, any dtype.
        budget: Tokens to hand out in each row.
        caps: `[..., G]` int64, most a group can take.

    Returns:
        `[..., G]` int64.

    Raises:
        MmfastError: The groups of a row hold fewer than `budget`.
    """
    weights, caps = torch.broadcast_tensors(weights.double(), caps)
    if bool((caps.sum(-1) < budget).any()):
        raise MmfastError(
            f"cannot share {budget} tokens out among groups that hold {int(caps.sum(-1).min())}"
        )
    quota = _quotas(weights, budget, caps)
    counts = (quota + _ROUNDING).floor().long()
    fraction = ((quota - counts) / _ROUNDING).round().masked_fill(counts >= caps, -1)
    rank = fraction.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    return counts + (rank < budget - counts.sum(-1, keepdim=True)).long()


def _quotas(weights: Tensor, budget: int, caps: Tensor) -> Tensor:
    """Proportional shares, not yet whole; those that reach their cap stay there."""
    full = caps <= 0
    quota = torch.zeros_like(weights)
    for _ in range(weights.shape[-1] + 1):
        left = budget - caps.masked_fill(~full, 0).sum(-1, keepdim=True)
        open_weight = weights.masked_fill(full, 0)
        total = open_weight.sum(-1, keepdim=True)
        open_weight = torch.where(total > 0, open_weight, (~full).double())
        total = open_weight.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        quota = torch.where(full, caps, left * (open_weight / total))
        over = ~full & (quota + _ROUNDING >= caps)
        if not bool(over.any()):
            break
        full = full | over
    return quota
