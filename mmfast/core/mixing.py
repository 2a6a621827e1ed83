"""Composition of reductions where one source feeds several outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mmfast.core.reduction import Reduction

Triplets = tuple[Tensor, Tensor, Tensor]  # output, source and weight, each [..., K]


def mixed_then(first: Reduction, second: Reduction) -> Triplets:
    """The triplets of `first` (N to M) followed by `second` (M to K).

    An output of -1 takes no part. Where both combine several tokens the triplets are dense,
    K * N of them.
    """
    if first.mix is not None and second.mix is None:
        slot = second.owner.gather(-1, first.mix.output)
        share = second.share().gather(-1, first.mix.output)
        return slot, first.mix.source, first.mix.weight * share
    if second.mix is not None and first.pure:
        return second.mix.output, first.keep.gather(-1, second.mix.source), second.mix.weight
    matrix = dense(second) @ dense(first)  # [..., K, N]
    places = torch.ones_like(matrix, dtype=torch.int64)
    output = places.cumsum(-2).flatten(-2) - 1
    source = places.cumsum(-1).flatten(-2) - 1
    return output, source, matrix.flatten(-2)


def dense(reduction: Reduction) -> Tensor:
    """Weights of all sources in all outputs, `[..., M, N]` float64."""
    eye = torch.eye(reduction.n, dtype=torch.float64, device=reduction.keep.device)
    return reduction.apply(eye.expand(*reduction.keep.shape[:-1], *eye.shape))
