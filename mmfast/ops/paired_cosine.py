"""Cosine of rows that face each other: neighbours in time or in space."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.row_dots import row_dots
from mmfast.ops.temporal_difference import temporal_difference

_CHUNK = 1_000_000  # numbers compared at once on the host: the three products then share a cache


def paired_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` with the row of `b` in its place, both `[..., D]`: float64 `[...]`.

    Equal rows give exactly 1: their dot product and their squared lengths come from the same
    summation, and the root of a square is exact in float64. A static video is then a set of true
    ties, not of rounding noise in either direction. A zero row has cosine 0 with anything.
    """
    small = a.device.type != "cpu" or a.numel() <= _CHUNK or torch.compiler.is_compiling()
    if not small and a.ndim > 1 and a.shape == b.shape:
        if len(a) == 1:
            return paired_cosine(a[0], b[0])[None]
        some = max(1, len(a) * _CHUNK // a.numel())
        pairs = zip(a.split(some), b.split(some), strict=True)
        return torch.cat([paired_cosine(*pair) for pair in pairs])
    scale = (row_dots(a, a) * row_dots(b, b)).sqrt()
    return row_dots(a, b) / scale.masked_fill(scale == 0, torch.inf)


def temporal_cosine(x: Tensor, frames: int) -> Tensor:
    """Cosine of every token with the token at the same place one frame later.

    Args:
        x: `[..., frames * n, D]`, frame after frame.
        frames: Number of frames T.

    Returns:
        `[..., T - 1, n]` float64.
    """
    video = x.unflatten(-2, (frames, -1))  # [..., T, n, D]
    lead, n = video.shape[:-3], video.shape[-2]
    flat = video.reshape(-1, n, x.shape[-1])
    cosine = temporal_difference(flat, [frames] * (len(flat) // frames), l1=False).cosine
    return cosine.reshape(*lead, frames, n)[..., 1:, :]
