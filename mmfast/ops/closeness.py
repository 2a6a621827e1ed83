"""Closeness to a point, by a sum of Gaussian kernels."""

from __future__ import annotations

from torch import Tensor

_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)


def closeness(x: Tensor, centre: Tensor) -> Tensor:
    """Sum of `exp(-|x - centre|^2 / (2 a))` over five widths a from 1/8 to 2: 5 at the centre.

    Args:
        x: Rows `[..., n, C]`, of unit length in the methods that use it.
        centre: Broadcasts to them, `[..., 1, C]`.

    Returns:
        `[..., n]`.
    """
    square = (x - centre).square().sum(-1)
    total = (-square / (2 * _WIDTHS[0])).exp()
    for width in _WIDTHS[1:]:
        total = total + (-square / (2 * width)).exp()
    return total
