"""Cosine of rows that face each other: neighbours in time or in space."""

from __future__ import annotations

import torch
from torch import Tensor


def paired_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` with the row of `b` in its place, both `[..., D]`: float64 `[...]`.

    Equal rows give exactly 1: their dot product and their squared lengths come from the same
    summation, and the root of a square is exact in float64. A static video is then a set of true
    ties, not of rounding noise in either direction. A zero row has cosine 0 with anything.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    scale = (_dot(a, a) * _dot(b, b)).sqrt()
    return _dot(a, b) / scale.masked_fill(scale == 0, torch.inf)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    product: Tensor = torch.linalg.vecdot(a, b)
    return product.double()


def temporal_cosine(x: Tensor, frames: int) -> Tensor:
    """Cosine of every token with the token at the same place one frame later.

    Args:
        x: `[..., frames * n, D]`, frame after frame.
        frames: Number of frames T.

    Returns:
        `[..., T - 1, n]` float64.
    """
    video = x.unflatten(-2, (frames, -1))  # [..., T, n, D]
    return paired_cosine(video[..., :-1, :, :], video[..., 1:, :, :])
