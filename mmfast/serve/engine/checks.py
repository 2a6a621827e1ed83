"""What can be refused before anything is computed."""

from __future__ import annotations

import math
import secrets
from dataclasses import replace
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import Sampling


def checked(sampling: Sampling) -> Sampling:
    """The same with a seed.

    Raises:
        MmfastError: A number is outside its range.
    """
    heat = sampling.temperature
    ranges = {
        "max_tokens": (sampling.max_tokens, sampling.max_tokens >= 1, "1 or more"),
        "temperature": (heat, math.isfinite(heat) and heat >= 0, "0 or more"),
        "top_p": (sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
    }
    for name, (value, fine, choices) in ranges.items():
        if not fine:
            raise MmfastError(f"{name}={value!r} is not allowed; give {choices}")
    seed = secrets.randbits(62) if sampling.seed is None else sampling.seed
    return replace(sampling, seed=seed)


def fitting(prompt: int, answer: int, context: int) -> int:
    """Tokens of a prompt and its answer.

    Raises:
        MmfastError: They are more than fit.
    """
    if prompt + answer > context:
        raise MmfastError(
            f"{prompt} tokens of prompt and max_tokens={answer} are more than the {context} that "
            "fit; ask for less, or give fewer or smaller media"
        )
    return prompt + answer


def context_of(model: Any) -> int:
    """Longest prompt and answer of a model in tokens."""
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 4096)
