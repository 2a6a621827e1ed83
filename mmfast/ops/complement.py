"""The indices that are not in a list."""

from __future__ import annotations

import torch
from torch import Tensor


def complement(index: Tensor, n: int) -> Tensor:
    """Ascending indices below `n` that are not in `index`.

    Args:
        index: `[..., K]` int64, no duplicates.
        n: Number of indices.

    Returns:
        `[..., n - K]` int64.
    """
    taken = torch.zeros(*index.shape[:-1], n, dtype=torch.int8, device=index.device)
    taken.scatter_(-1, index, torch.ones_like(index, dtype=torch.int8))
    return taken.argsort(dim=-1, stable=True)[..., : n - index.shape[-1]]
