"""Voxtral: a Whisper encoder before a Llama; windows of 30 s are tokens to their very end.

Four of the 1500 frames behind the convolutions are one token, those of padding too.
Paper: arXiv 2507.13264.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.sound import audio_tower, joined_means, lines


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """A line of tokens per window."""
    return lines(_lengths(base, call))


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Frames to the tokens they are joined in."""
    return joined_means(values, _lengths(base, call), _joined(base))


def _joined(base: Any) -> int:
    config = base.config.audio_config
    return int(config.intermediate_size // config.d_model)


def _lengths(base: Any, call: Call) -> list[int]:
    frames = base.config.audio_config.max_source_positions
    return [frames // _joined(base)] * len(call["input_features"])


add_adapter(
    Adapter("voxtral", layout, fold, tower=audio_tower, audio_tower=audio_tower, media=("audio",))
)
