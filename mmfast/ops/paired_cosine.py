"""Cosine of rows that face each other: neighbours in time or in space."""

from __future__ import annotations

import torch
from torch import Tensor


def squared_norms(x: Tensor) -> Tensor:
    """Squared row lengths of `x` `[..., N, D]`, `[..., N]`, in at least float32."""
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    return (rows * rows).sum(-1)


def paired_cosine(a: Tensor, b: Tensor, norms_a: Tensor, norms_b: Tensor) -> Tensor:
    """Cosine of row i of `a` with row i of `b`, both `[..., N, D]`, as float64 `[..., N]`.

    Equal rows give exactly 1: their dot product and their squared norms come from the same
    summation, and the root of a square is exact in float64. A static video is then a set of true
    ties, not of rounding noise in either direction. A zero row has cosine 0 with anything.

    Args:
        a: Left rows.
        b: Right rows.
        norms_a: `squared_norms(a)`.
        norms_b: `squared_norms(b)`.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    dot = (a.to(wide) * b.to(wide)).sum(-1).double()
    scale = (norms_a.double() * norms_b.double()).sqrt()
    return dot / scale.masked_fill(scale == 0, torch.inf)


def temporal_cosine(x: Tensor, frames: int) -> Tensor:
    """Cosine of every token with the token at the same place one frame later.

    Args:
        x: `[..., frames * n, D]`, frame after frame.
        frames: Number of frames T.

    Returns:
        `[..., T - 1, n]` float64.
    """
    video = x.unflatten(-2, (frames, -1))  # [..., T, n, D]
    cosines: list[Tensor] = []
    before = video[..., 0, :, :]
    norms = squared_norms(before)
    for frame in range(1, frames):  # a frame at a time: products of one frame stay in the cache
        after = video[..., frame, :, :]
        norms_after = squared_norms(after)
        cosines.append(paired_cosine(before, after, norms, norms_after))
        before, norms = after, norms_after
    if not cosines:
        return x.new_empty((*video.shape[:-3], 0, video.shape[-2]), dtype=torch.float64)
    return torch.stack(cosines, dim=-2)
