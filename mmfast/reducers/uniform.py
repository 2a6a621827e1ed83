"""Evenly spaced tokens: the baseline without any choice."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


@register("uniform", sites=("pre", "llm"))
def uniform(tokens: Tokens, budget: int) -> Reduction:
    """Keep evenly spaced tokens: the middle one of each of `budget` equal runs.

    Args:
        tokens: `x` of shape `[..., N, D]`.
        budget: Tokens to keep.
    """
    step = torch.arange(budget, device=tokens.x.device)
    keep = (2 * step + 1) * tokens.n // (2 * budget)  # integers: no rounding, no repeats
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], budget), tokens.n)
