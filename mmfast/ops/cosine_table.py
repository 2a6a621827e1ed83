"""Cosines of every row with every other, with exact ties."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mmfast.ops.snap import snap
from mmfast.ops.unit import unit_rows

_CHUNK = 1 << 19  # float64 numbers of a temporary, 4 MB: they stay in cache


def cosine_table(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` `[..., A, D]` with each row of `b` `[..., B, D]`.

    Returns:
        `[..., A, B]` float64 in steps of 2^-30: equal rows have equal entries. A zero row has
        cosine 0 with anything, itself included.
    """
    parts = list(cosine_parts(a, b))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def cosine_parts(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """`cosine_table` some rows of `a` at a time, for what needs each row of the table once.

    Yields:
        `[..., rows, B]`; nothing in float64 is as large as `a` or the table.
    """
    columns = unit_rows(b.double()).transpose(-1, -2)
    items, widest = a.shape[:-2].numel(), max(1, a.shape[-1], b.shape[-2])
    for rows in a.split(max(64, _CHUNK // max(1, items * widest)), -2):
        yield snap(unit_rows(rows.double()) @ columns)
