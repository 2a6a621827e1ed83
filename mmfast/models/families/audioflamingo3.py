"""Audio Flamingo 3: a Whisper encoder before a Qwen2; tokens of padding are dropped.

Two frames behind the convolutions are averaged to one token.
Paper: arXiv 2507.08128.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.sound import audio_tower, joined_means, lines


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """A line of tokens per window, as many as it has sound."""
    return lines(_lengths(base, call))


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Frames to the tokens they are averaged in."""
    return joined_means(values, _lengths(base, call), 2)


def _lengths(base: Any, call: Call) -> list[int]:
    frames = call["input_features_mask"].sum(-1)
    tokens: list[int] = base.audio_tower._get_feat_extract_output_lengths(frames)[1].tolist()
    return tokens


add_adapter(
    Adapter(
        "audioflamingo3", layout, fold, tower=audio_tower, audio_tower=audio_tower, media=("audio",)
    )
)
