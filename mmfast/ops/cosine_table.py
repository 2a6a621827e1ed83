"""Cosines of every row with every other, with exact ties."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.snap import snap
from mmfast.ops.unit import unit_rows

_CHUNK = 1 << 18  # float64 numbers of a temporary, 2 MB: they stay in cache


def cosine_table(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` `[..., A, D]` with each row of `b` `[..., B, D]`.

    Rows of `a` are taken a chunk at a time, so that nothing in float64 is as large as `a`.

    Returns:
        `[..., A, B]` float64 in steps of 2^-30: equal rows have equal entries. A zero row has
        cosine 0 with anything, itself included.
    """
    columns = unit_rows(b.double()).transpose(-1, -2)
    table = torch.empty(
        (*a.shape[:-1], b.shape[-2]), dtype=torch.float64, device=a.device
    )
    items = a.shape[:-2].numel()
    step = max(32, _CHUNK // max(1, items * max(a.shape[-1], b.shape[-2])))
    for rows, out in zip(a.split(step, -2), table.split(step, -2), strict=True):
        out.copy_(snap(unit_rows(rows.double()) @ columns))
    return table
