"""Evenly spaced places in a sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def even_spots(count: int, n: int, device: torch.device | None = None) -> Tensor:
    """The middles of `count` equal runs of `n` places, `[count]` int64, all different."""
    return (2 * torch.arange(count, device=device) + 1) * n // (2 * max(1, count))
