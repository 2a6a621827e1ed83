"""GLM-ASR: a rotary audio encoder before a Llama; tokens of padding are dropped.

Four frames behind the convolutions, the second of which halves them, are joined to one token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.sound import audio_tower, joined_means, lines

_JOINED = 4


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """A line of tokens per window, as many as it has sound."""
    return lines(_lengths(call))


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Frames to the tokens they are joined in."""
    return joined_means(values, _lengths(call), _JOINED)


def _lengths(call: Call) -> list[int]:
    frames = (call["input_features_mask"].sum(-1) - 1) // 2 + 1
    return [int(n) // _JOINED for n in frames]


add_adapter(
    Adapter("glmasr", layout, fold, tower=audio_tower, audio_tower=audio_tower, media=("audio",))
)
