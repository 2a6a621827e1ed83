"""Cosines of every row with every other, with exact ties."""

from __future__ import annotations

from torch import Tensor

from mmfast.ops.snap import snap
from mmfast.ops.unit import unit_rows


def cosine_table(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` `[..., A, D]` with each row of `b` `[..., B, D]`.

    Returns:
        `[..., A, B]` float64 in steps of 2^-30: equal rows have equal entries. A zero row has
        cosine 0 with anything, itself included.
    """
    return snap(unit_rows(a.double()) @ unit_rows(b.double()).transpose(-1, -2))
