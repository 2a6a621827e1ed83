"""Temporal token sampling: tokens of evenly spaced frames only."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import even_spots


@register("token_sampling", paper="2503.04130")
def token_sampling(tokens: Tokens, budget: int) -> Reduction:
    """Keep the tokens of as few evenly spaced frames as hold the budget.

    STORM samples frames like this at test time (Jiang et al., 2025), after temporal layers that
    have mixed the frames; without such layers it equals reading fewer frames, the baseline that
    any video method has to beat. The sampled frames share the budget
    equally, give or take one, evenly spaced in each, which is a choice of this project.

    Args:
        tokens: `x` `[..., N, D]`; without a `grid` it is one frame, a row of tokens.
        budget: Tokens to keep.
    """
    frames, rows, columns = tokens.grid or (1, 1, tokens.n)
    n = rows * columns
    sampled = even_spots(-(-budget // n), frames).tolist()
    ends = [budget * i // len(sampled) for i in range(len(sampled) + 1)]
    spots = [t * n + even_spots(ends[i + 1] - ends[i], n) for i, t in enumerate(sampled)]
    keep = torch.cat(spots).to(tokens.x.device)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], budget), tokens.n)
