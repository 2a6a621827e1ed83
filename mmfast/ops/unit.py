"""Rows of unit length."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_rows(x: Tensor) -> Tensor:
    """Divide every row of `x` `[..., N, D]` by its length, in at least float32.

    A zero row stays zero: its cosine with anything is 0, never NaN.
    """
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)  # [..., N, 1]
    length = length.masked_fill(length == 0, torch.inf)
    own = rows is not x and not rows.requires_grad  # a copy may be overwritten
    unit: Tensor = rows.div_(length) if own else rows / length
    return unit
