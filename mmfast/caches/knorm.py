"""Knorm: short keys, head by head."""

from __future__ import annotations

from typing import Any

import numpy as np
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
        told, given = length.numpy(), [place.numpy() for place in places]
        longest = (told >= most.numpy() * (1 - 2 * error)).nonzero()  # or nearly so
        count, both = len(longest[0]), map(np.concatenate, zip(longest, given, strict=True))
        lengths = _lengths(tokens.x[tuple(map(torch.from_numpy, both))]).numpy()
        best = np.zeros(told.shape[:-1])
        np.maximum.at(best, longest[:-1], lengths[:count])
        return torch.from_numpy(_score(lengths[count:], best[tuple(given[:-1])]))

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
    scores: Tensor = _score(length, length.amax(-1, keepdim=True))
    return scores


def _lengths(rows: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(rows.double(), dim=-1)
    return found


def _score(length: Any, longest: Any) -> Any:
    # Keys that a model normalises differ in length by rounding alone, which must not choose.
    return (length / longest.clip(_TINY) * -_STEPS).round()
