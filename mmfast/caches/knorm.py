"""Knorm: short keys, head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens

_STEPS, _TINY = 2.0**16, 1e-30


@policy("knorm", paper="2406.11430", needs=("x",), role="score")
def knorm(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the tokens with the shortest keys.

    Devoto et al. (EMNLP 2024): the shorter a key, the more attention it tends to get. `keynorm`
    measures the same over all heads, and spares text.

    Args:
        tokens: Keys `x` `[..., H, N, d]`.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    length = torch.linalg.vector_norm(tokens.x.double(), dim=-1)
    # Keys that a model normalises differ in length by rounding alone, which must not choose.
    scores: Tensor = -(length / length.amax(-1, keepdim=True).clamp_min(_TINY) * _STEPS).round()
    return scores
