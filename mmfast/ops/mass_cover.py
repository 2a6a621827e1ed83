"""The fewest entries that hold a share of a distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def mass_cover(mass: Tensor, share: float) -> Tensor:
    """Mark, row by row, the fewest entries whose sum reaches `share` of the row's sum.

    Args:
        mass: `[..., C]`, not negative, no row all zero.
        share: In (0, 1]; 1 takes every entry. Of equal entries the first ones are taken.

    Returns:
        `[..., C]` bool, at least one per row.
    """
    if share >= 1:
        return torch.ones_like(mass, dtype=torch.bool)
    ordered, index = mass.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    taken = before < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(taken).scatter_(-1, index, taken)
