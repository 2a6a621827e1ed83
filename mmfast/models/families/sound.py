"""Voxtral, GLM-ASR, Audio Flamingo 3 and Qwen3-ASR: sound before a language model.

A window, padded, is a row of `input_features`; its frames behind the convolutions are joined,
several in one token, and the tokens of padding are dropped (GLM-ASR, Audio Flamingo 3) or not
(Voxtral). A long sound is several windows in a row, each an item of its own. Qwen3-ASR has no
windows: all frames of all sounds are one sequence.
Papers: arXiv 2507.13264 (Voxtral), 2507.08128 (Audio Flamingo 3).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from einops import reduce
from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.tower import Tower

# `(base model, call) -> ` tokens of each window, and frames joined in a token.
Lengths = Callable[[Any, Call], tuple[list[int], int]]


def voxtral(base: Any, call: Call) -> tuple[list[int], int]:
    """Four of the 1500 frames behind the convolutions are one token, those of padding too."""
    config = base.config.audio_config
    joined = int(config.intermediate_size // config.d_model)
    return [config.max_source_positions // joined] * len(call["input_features"]), joined


def glmasr(base: Any, call: Call) -> tuple[list[int], int]:
    """Four frames behind the convolutions, the second of which halves them, are one token."""
    frames = (call["input_features_mask"].sum(-1) - 1) // 2 + 1
    return [int(n) // 4 for n in frames], 4


def audioflamingo3(base: Any, call: Call) -> tuple[list[int], int]:
    """Two frames behind the convolutions of a Whisper encoder are averaged to one token."""
    frames = call["input_features_mask"].sum(-1)
    return base.audio_tower._get_feat_extract_output_lengths(frames)[1].tolist(), 2


def qwen3_asr(base: Any, call: Call) -> list[int]:
    """Return the tokens of each sound: an encoder without padding, chunk by chunk."""
    tower, mask = base.audio_tower, call["input_features_mask"]
    chunks = mask.view(len(mask), -1, 2 * tower.n_window).sum(-1)
    found: list[int] = tower._post_cnn_length(chunks).sum(-1).tolist()
    return found


def packed_tower(base: Any) -> Tower:
    """The audio encoder: all sounds in one sequence, each attending to itself."""
    encoder = base.audio_tower
    return Tower(base, encoder, encoder.layers, packed=True, class_token=False)


def audio_tower(base: Any) -> Tower:
    """The audio encoder: a batch of windows."""
    encoder = base.audio_tower
    return Tower(base, encoder, encoder.layers, packed=False, class_token=False)


def _adapter(family: str, lengths: Lengths) -> Adapter:
    def layout(base: Any, kind: str, call: Call) -> list[Layout]:
        return [Layout(n, (n, 1, 1)) for n in lengths(base, call)[0]]

    def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
        counts, joined = lengths(base, call)
        windows = values.view(len(counts), -1, values.shape[-1])  # [windows, frames, C]
        return [
            reduce(window[: n * joined], "(token frame) c -> token c", "mean", frame=joined)
            for window, n in zip(windows, counts, strict=True)
        ]

    return Adapter(
        family, layout, fold, tower=audio_tower, audio_tower=audio_tower, media=("audio",)
    )


for _lengths in (voxtral, glmasr, audioflamingo3):
    add_adapter(_adapter(_lengths.__name__, _lengths))


def _packed_layout(base: Any, kind: str, call: Call) -> list[Layout]:
    return [Layout(n, (n, 1, 1)) for n in qwen3_asr(base, call)]


def _packed_fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    return list(values.split(qwen3_asr(base, call)))


add_adapter(
    Adapter(
        "qwen3_asr",
        _packed_layout,
        _packed_fold,
        tower=packed_tower,
        audio_tower=packed_tower,
        media=("audio",),
    )
)
