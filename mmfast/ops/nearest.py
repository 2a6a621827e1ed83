"""The most similar column of each row, with a defined order of ties."""

from __future__ import annotations

import torch
from torch import Tensor

# Products of equal rows may differ in the last bits, by their place in the matrix.
_ROUNDING = 2.0**-22

# Products held at a time: 4 MB of float32 stay in a processor's cache, a GPU wants large ones.
_CHUNK, _CHUNK_CUDA = 1 << 20, 1 << 28


def nearest(cosine: Tensor) -> Tensor:
    """For each row of `cosine` `[..., A, B]` the first column that is largest up to rounding.

    Returns:
        `[..., A]` int64. Among equal tokens the lowest index wins on any device and shape.
    """
    best = cosine.amax(dim=-1, keepdim=True)
    return (cosine >= best - _ROUNDING).byte().argmax(dim=-1)


def nearest_rows(a: Tensor, b: Tensor, *, not_first: bool = False) -> Tensor:
    """The row of `b` with the largest product for each row of `a`, as `nearest` counts ties.

    The matrix of products is never there as a whole: rows of `a` are taken a chunk at a time.

    Args:
        a: `[..., A, D]` unit rows.
        b: `[..., B, D]` unit rows.
        not_first: The first row of `b` is no choice while there is another.

    Returns:
        `[..., A]` int64.
    """
    columns = b.transpose(-1, -2)
    one_row = max(1, a.shape[:-2].numel() * b.shape[-2])
    step = max(64, (_CHUNK_CUDA if a.is_cuda else _CHUNK) // one_row)
    found = []
    for rows in a.split(step, -2):
        cosine = rows @ columns
        if not_first:
            cosine[..., 0] = -torch.inf
        found.append(nearest(cosine))
    return found[0] if len(found) == 1 else torch.cat(found, -1)
