"""KeyDiff: keys that point another way than most."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import RoughScores, snap

_LEAST = 2.0**-40  # a key that is shorter is not brought to length 1


def _rough(tokens: Tokens, budget: int) -> RoughScores | None:
    score = _score(tokens.x).numpy()
    # One key that is not finite spoils the mean, and with it all scores, which add up to at most N.
    return RoughScores(score) if math.isfinite(score.sum()) else None


@policy("keydiff", paper="2504.15364", needs=("x",), role="score", rough=_rough)
def keydiff(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the keys of the lowest cosine with the mean direction of all keys.

    Park et al. (2025): keys that differ from the others get more attention, so a cache of diverse
    keys needs no attention to be chosen. The anchor is the mean of the keys at length 1.

    Args:
        tokens: Keys `x` `[..., H, N, d]`, as the cache holds them.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    return _score(tokens.x)


def _score(keys: Tensor) -> Tensor:
    rows = keys.double()
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    share = length.clamp_min_(_LEAST).reciprocal_()  # [..., N, 1]
    # Keys that cancel out have a mean of rounding errors, which points nowhere.
    mean = (share.transpose(-1, -2) @ rows).transpose(-1, -2) / -rows.shape[-2]  # [..., d, 1]
    anchor = mean / torch.linalg.vector_norm(mean, dim=-2, keepdim=True).clamp_min(_LEAST)
    # Three times as fast as `rows @ anchor`.
    along = anchor.transpose(-1, -2) @ rows.transpose(-1, -2)
    return snap(along.squeeze(-2).mul_(share.squeeze(-1)))
