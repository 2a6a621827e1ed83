"""Attention-based pruning of an audio encoder's tokens that leaves no long gap."""

from __future__ import annotations

import torch

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import register
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import grouped_topk, stable_topk


@register("audio_prune", paper="2504.01690", needs=("attn",))
def audio_prune(tokens: Tokens, budget: int, *, coverage: float = 0.5) -> Reduction:
    """Keep the tokens that received most attention, and some of every stretch of time.

    Top-k by attention works for audio, but quiet, little attended tokens matter too (Lee and Lee,
    ECAI 2025). The guarantee is this project's: part of the budget goes to the most attended token
    of as many equal stretches of the sequence, the rest to the most attended of all others.

    Args:
        tokens: `attn` `[..., N]`, attention received in the encoder, in order of time.
        budget: Tokens to keep.
        coverage: Share of the budget for stretches, from 0 (top-k) to 1, one stretch at least
            unless it is 0.
    """
    if not 0 <= coverage <= 1:
        raise SpecError(f"knob coverage={coverage} of 'audio_prune' is no share from 0 to 1")
    attn, n = tokens.need("attn").double(), tokens.n
    parts = max(1, round(coverage * budget)) if coverage else 1
    stretch = torch.arange(n, device=attn.device) * parts // n
    one_each = torch.full((parts,), int(coverage > 0), device=attn.device)
    covered = grouped_topk(attn, stretch, one_each)
    first = torch.where(covered, torch.inf, attn)
    return Reduction.prune(stable_topk(first, budget), n)
