"""Knorm: short keys, head by head."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.core.registry import policy
from mmfast.core.tokens import Tokens
from mmfast.ops.ranking import RoughScores
from mmfast.ops.similarity import rough_lengths

_STEPS, _TINY = 2.0**16, 1e-30


def _rough(tokens: Tokens, budget: int) -> RoughScores | None:
    found = rough_lengths(tokens.x)
    if found is None:
        return None
    length, error = found
    most = length.amax(-1, keepdim=True)

    def exact(places: tuple[Tensor, ...]) -> Tensor:
        near = (length >= most * (1 - 2 * error)).nonzero(as_tuple=True)  # the longest among them
        lengths = torch.zeros(length.shape, dtype=torch.float64)
        lengths[near] = _lengths(tokens.x[near])
        return _score(_lengths(tokens.x[places]), lengths.amax(-1)[places[:-1]])

    # Rounding to steps moves a score by half of one, and both lengths are off.
    return RoughScores(length / most * -_STEPS, 0.5 + _STEPS * 3 * error, exact)


@policy("knorm", paper="2406.11430", needs=("x",), role="score", rough=_rough)
def knorm(tokens: Tokens, budget: int) -> Tensor:
    """Keep in each head the tokens with the shortest keys.

    Devoto et al. (EMNLP 2024): the shorter a key, the more attention it tends to get. `keynorm`
    measures the same over all heads, and spares text.

    Args:
        tokens: Keys `x` `[..., H, N, d]`.
        budget: Tokens to keep in every head; a share is of all tokens.
    """
    length = _lengths(tokens.x)
    return _score(length, length.amax(-1, keepdim=True))


def _lengths(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1)
    return found


def _score(length: Tensor, longest: Tensor) -> Tensor:
    # Keys that a model normalises differ in length by rounding alone, which must not choose.
    scores: Tensor = (length / longest.clamp_min(_TINY) * -_STEPS).round()
    return scores
