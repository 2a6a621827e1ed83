"""What the drivers of golden vectors share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.spec import reduce
from mmfast.core.tokens import Tokens

Arrays = Mapping[str, Tensor]
Params = Mapping[str, Any]
Outcome = tuple[dict[str, Tensor], list[str]]
Driver = Callable[[Arrays, Params], Outcome]


def run(tokens: Tokens, spec: str) -> Reduction:
    """The one Reduction of a spec, checked."""
    reduction = reduce(tokens, spec)
    if isinstance(reduction, list):
        raise MmfastError(f"{spec!r} gave {len(reduction)} reductions instead of one")
    reduction.check()
    return reduction


def order_of(reduction: Reduction) -> Tensor:
    """Slots in order of emission."""
    if reduction.order is not None:
        return reduction.order
    return torch.arange(reduction.m).expand_as(reduction.keep)


def mask_of(reduction: Reduction) -> Tensor:
    """`[..., N]` bool, True at the kept sources."""
    none = torch.zeros(reduction.owner.shape, dtype=torch.bool)
    return none.scatter_(-1, reduction.keep, torch.ones_like(reduction.keep, dtype=torch.bool))
