"""Knorm: short keys, head by head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import Numbers, RoughScores, lengths_at, row_maxima
from mmfast.ops.similarity import rough_lengths

_STEPS, _TINY = 2.0**16, 1e-30


def _rough(tokens: Tokens, budget: int) -> RoughScores | None:
    keys = tokens.x.float()
    found = rough_lengths(keys)
    if found is None:
        return None
    length, error = found[0].numpy(), found[1]
    most, n = length.max(-1, keepdims=True), tokens.n

    def exact(places: Numbers) -> Numbers:
        near = (length >= most * (1 - 2 * error)).reshape(-1).nonzero()[0]  # the longest, too
        lengths = lengths_at(keys, near, places)
        longest = row_maxima(lengths[: len(near)], near // n, most.size)
        found: Numbers = _score(lengths[len(near) :], longest[places // n]).round()
        return found

    # Rounding to steps moves a score by half of one, and both lengths are off.
    return RoughScores(length * (-_STEPS / most), 0.5 + _STEPS * 2 * error, exact)


@policy("knorm", paper="2406.11430", needs=("x",), role="score", rough=_rough)
def knorm(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the tokens with the shortest keys.

    Devoto et al. (EMNLP 2024): the shorter a key, the more attention it tends to get. `keynorm`
    measures the same over all heads, and spares text.

    Args:
        tokens: Keys `x` `[..., H, N, d]`.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    length = torch.linalg.vector_norm(tokens.x, dim=-1, dtype=torch.float64)
    scores: Tensor = _score(length, length.amax(-1, keepdim=True).clamp_min(_TINY)).round()
    return scores


def _score(length: Any, longest: Any) -> Any:
    """Scores of lengths, tensors or arrays, before they are rounded to whole steps.

    Keys that a model normalises differ in length by rounding alone, which must not choose.
    """
    return length / longest * -_STEPS
