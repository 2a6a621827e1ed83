"""Find rows that are equal bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor


def first_of_equal(rows: Tensor) -> Tensor:
    """For every row of `rows` `[N, D]`, float32 or float64, the first row equal to it: `[N]`.

    Rows that differ in a few spread columns cannot be equal, so only the others are compared in
    full: video that really stands still costs one pass, anything else next to nothing.
    """
    n, width = rows.shape
    first = torch.arange(n, device=rows.device)
    probe = rows[:, :: max(1, width // 8)]
    suspects = first
    for columns in (probe, rows):
        _, group, sizes = torch.unique(
            _hash(columns[suspects] if len(suspects) < n else columns),
            return_inverse=True,
            return_counts=True,
        )
        repeated = sizes[group] > 1
        suspects, group = suspects[repeated], group[repeated]
        if not len(suspects):
            return first
    lowest = torch.full((len(sizes),), n, device=rows.device)
    lowest = lowest.scatter_reduce(0, group, suspects, "amin")[group]
    equal = (rows[suspects] == rows[lowest]).all(-1)  # a collision of hashes is no equality
    first[suspects[equal]] = lowest[equal]
    return first


def _hash(rows: Tensor) -> Tensor:
    """One int64 per row `[N, D]`: sums of bits times odd numbers, wrapping, in any order."""
    bits = (rows + 0.0).view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
    generator = torch.Generator().manual_seed(0)
    odd = 2 * torch.randint(2**61, (bits.shape[-1],), generator=generator) + 1
    return (bits * odd.to(rows.device)).sum(-1)
