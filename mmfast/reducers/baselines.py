"""Random tokens: the baseline that every method has to beat."""

from __future__ import annotations

import torch

from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens


@register("random", sites=("pre", "llm"), text=True)
def random(tokens: Tokens, budget: int, *, seed: int = 0) -> Reduction:
    """Keep a random subset, the same one for the same seed.

    Args:
        tokens: `x` of shape `[..., N, D]`; every item of a batch keeps the same places.
        budget: Tokens to keep.
        seed: Seed of the draw. It is made on the CPU, so all devices agree.
    """
    generator = torch.Generator().manual_seed(seed)
    keep = torch.randperm(tokens.n, generator=generator)[:budget].to(tokens.x.device)
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], budget), tokens.n)


@register("uniform", sites=("pre", "llm"), text=True)
def uniform(tokens: Tokens, budget: int) -> Reduction:
    """Keep evenly spaced tokens: the middle one of each of `budget` equal runs.

    Args:
        tokens: `x` of shape `[..., N, D]`.
        budget: Tokens to keep.
    """
    step = torch.arange(budget, device=tokens.x.device)
    keep = (2 * step + 1) * tokens.n // (2 * budget)  # integers: no rounding, no repeats
    return Reduction.prune(keep.expand(*tokens.x.shape[:-2], budget), tokens.n)
