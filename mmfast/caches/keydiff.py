"""KeyDiff: keys that point another way than most."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap


@policy("keydiff", paper="2504.15364", needs=("x",), role="score")
def keydiff(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the keys of the lowest cosine with the mean direction of all keys.

    Park et al. (2025): keys that differ from the others get more attention, so a cache of diverse
    keys needs no attention to be chosen. The anchor is the mean of the keys at length 1.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, as the cache holds them.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    unit = _unit(tokens.x.double())
    anchor = _unit(unit.mean(-2, keepdim=True))
    return -snap((unit * anchor).sum(-1))


def _unit(rows: Tensor) -> Tensor:
    """Rows `[..., d]` at length 1; one of zeros stays."""
    # Keys that cancel out have a mean of rounding errors, which points nowhere.
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return rows / length.clamp_min(2.0**-40)
