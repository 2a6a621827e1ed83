"""Dot products of rows that face each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.floating[Any]]


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Dot product of each row of `a` with the row of `b` in its place, summed in float32 at least.

    Equal rows have equal products, to the bit: all come from one summation of one order.

    Args:
        a: `[..., D]`.
        b: `[..., D]`; leading dimensions broadcast.

    Returns:
        `[...]` float64.
    """
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    if a.device.type != "cpu" or torch.compiler.is_compiling():
        product: Tensor = torch.linalg.vecdot(a, b)
        return product.double()
    # BLAS row by row reads both once; torch writes the products out before it adds them.
    return torch.from_numpy(np.asarray(np.vecdot(rows_of(a), rows_of(b)))).double()


def rows_of(x: Tensor) -> Array:
    """A float32 or float64 tensor on the host as numpy array; copied unless rows are contiguous.

    BLAS takes another path for rows with gaps, with another order of summation.
    """
    x = x.detach()
    whole = x.shape[-1] == 1 or x.stride(-1) == 1
    array: Array = (x if whole else x.contiguous()).numpy()
    return array
