"""The most similar column of each row, with a defined order of ties."""

from __future__ import annotations

from torch import Tensor

# Products of equal rows may differ in the last bits, by their place in the matrix.
_ROUNDING = 2.0**-22


def nearest(cosine: Tensor) -> Tensor:
    """For each row of `cosine` `[..., A, B]` the first column that is largest up to rounding.

    Returns:
        `[..., A]` int64. Among equal tokens the lowest index wins on any device and shape.
    """
    best = cosine.amax(dim=-1, keepdim=True)
    return (cosine >= best - _ROUNDING).byte().argmax(dim=-1)
