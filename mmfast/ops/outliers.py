"""Scores that stick out of their distribution."""

from __future__ import annotations

import torch
from torch import Tensor


def outlier_count(score: Tensor) -> int:
    """How many values of `score` (any shape) lie above Q3 + 1.5 (Q3 - Q1), linear quartiles."""
    values = score.double().flatten()
    at = torch.tensor([0.25, 0.75], dtype=torch.float64, device=values.device) * (len(values) - 1)
    ranked = values.sort().values
    low, high = at.floor().long(), at.ceil().long()  # torch.quantile refuses 16 million values
    first, third = ranked[low] + (ranked[high] - ranked[low]) * (at - low)
    return int((values > third + 1.5 * (third - first)).sum())
