"""How much each row contributes to the leading directions of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.snap import snap


def information(x: Tensor, rank: float) -> Tensor:
    """Sum over the leading singular directions of `|u| * sigma` of each row.

    Args:
        x: `[..., N, D]`.
        rank: Directions whose singular value is below this share of the largest are left out;
            above 1e-6, where the squares that they are computed from lose their accuracy.

    Returns:
        `[..., N]` float64 in units of the largest singular value, steps of 2^-30.
    """
    rows = x.double()
    if rows.shape[-2] <= rows.shape[-1]:
        square, u = torch.linalg.eigh(rows @ rows.mT)
        part = u.mul_(square.clamp_min(0).sqrt()[..., None, :])  # [..., N, N]
    else:
        square, v = torch.linalg.eigh(rows.mT @ rows)
        part = rows @ v  # [..., N, D]
    sigma = square.clamp_min(0).sqrt()
    largest = sigma.amax(-1, keepdim=True)
    leading = (sigma > rank * largest)[..., None, :]
    total = part.abs_().mul_(leading).sum(-1)
    return snap(total / largest.masked_fill(largest == 0, 1.0))
