"""MixKV: important tokens, and the more alike the keys of a head are, diverse ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import SpecError
from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.eviction import pooled_votes
from mmfast.ops.ranking import rescale, snap
from mmfast.ops.similarity import unit_rows


@policy("mixkv", paper="2510.20707", needs=("x", "values", "attn_window"), role="score")
def mixkv(
    tokens: Tokens, budget: int, *, window: int = 32, kernel: int = 7, pool: str = "max"
) -> Tensor:
    """Keep the last tokens, and those that are important or, in heads of like keys, diverse.

    Liu et al. (ICLR 2026): importance alone keeps tokens that say the same in heads whose keys are
    alike, as those of pictures are. The score of a head is its importance, the votes of `snapkv`
    plus the length of the value, mixed with the diversity of the key, its negative cosine with the
    mean key. The weight of diversity is the mean cosine of all pairs of keys of the head.

    Args:
        tokens: Keys `x` and `values` `[..., H, N, d]`, and `attn_window` as for `snapkv`.
        budget: Tokens to keep in every head; a share is of all tokens. The window is among them,
            with at most half of the budget.
        window: Queries of the observation window, at least 1.
        kernel: Places that are pooled, an odd number.
        pool: `max` or `mean`.

    Raises:
        SpecError: A window of no query.
    """
    if window < 1:
        raise SpecError(f"knob window={window} of 'mixkv' holds no query; choose 1 or more")
    last = min(window, max(budget // 2, 1))
    before, n = tokens.n - last, tokens.n
    votes = pooled_votes(tokens.need("attn_window")[..., :before], kernel, pool)
    length = torch.linalg.vector_norm(tokens.need("values").double()[..., :before, :], dim=-1)
    units = unit_rows(tokens.x.double())
    mean = units.mean(-2, keepdim=True)
    alike = ((n * mean.square().sum(-1) - 1) / max(n - 1, 1)).clamp(0, 1)  # [..., H, 1]
    diverse = -snap((units[..., :before, :] * mean).sum(-1))
    importance = votes + _level_with(votes, length)
    score = snap((1 - alike) * importance + alike * _level_with(votes, diverse))
    return F.pad(score, (0, last), value=torch.inf)


def _level_with(votes: Tensor, other: Tensor) -> Tensor:
    """Another score `[..., N]` from 0 up, with the mean of the votes."""
    if not votes.shape[-1]:
        return votes
    score = rescale(other)
    mean = score.mean(-1, keepdim=True)
    return score * votes.mean(-1, keepdim=True) / mean.masked_fill(mean == 0, 1)
