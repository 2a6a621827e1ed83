"""KeyDiff: keys that point another way than most."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import snap

_LEAST = 2.0**-40  # a key that is shorter is not brought to length 1


@policy("keydiff", paper="2504.15364", needs=("x",), role="score")
def keydiff(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the keys of the lowest cosine with the mean direction of all keys.

    Park et al. (2025): keys that differ from the others get more attention, so a cache of diverse
    keys needs no attention to be chosen. The anchor is the mean of the keys at length 1.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, as the cache holds them.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    keys = tokens.x.double()
    # Keys that cancel out have a mean of rounding errors, which points nowhere.
    length = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_min(_LEAST)
    share = length.reciprocal().transpose(-1, -2)  # [..., 1, N]
    mean = share @ keys / tokens.n
    anchor = mean / torch.linalg.vector_norm(mean, dim=-1, keepdim=True).clamp_min(_LEAST)
    return -snap((anchor @ keys.transpose(-1, -2) * share).squeeze(-2))
