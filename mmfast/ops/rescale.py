"""Scores of any unit onto [0, 1]."""

from __future__ import annotations

from torch import Tensor

from mmfast.ops.snap import snap


def rescale(score: Tensor) -> Tensor:
    """Lowest to 0, highest to 1 along the last dimension, float64 in steps of 2^-30.

    Args:
        score: `[..., N]`; if all are equal, all become 0.
    """
    wide = score.double()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    span = high - low
    return snap((wide - low) / span.masked_fill(span == 0, 1.0))
