"""Qwen2.5-Omni, the thinker: images and video as in Qwen2.5-VL, and sound.

Sound is encoded inside the forward pass: 100 mel frames a second, halved by a convolution and
again by averaging pairs behind the last block. With `use_audio_in_video` the tokens of a clip and
of its sound alternate in the prompt; they are two items all the same.
Paper: arXiv 2503.20215.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.models.families import qwen, qwen2_5_vl
from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.tower import Tower


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One raster per image or video; a line of tokens per sound."""
    if kind != "audio":
        return qwen.layout(base, kind, call)
    return [Layout(n // 2, (n // 2, 1, 1)) for n in _frames(base, call)]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Patches or audio frames `[P, C]` to tokens: the mean of a unit, or of a pair of frames."""
    if kind != "audio":
        return qwen2_5_vl.fold(base, kind, values, call)
    sounds = values.split(_frames(base, call))
    return [each[: len(each) // 2 * 2].reshape(-1, 2, each.shape[-1]).mean(1) for each in sounds]


def audio_tower(base: Any) -> Tower:
    """The audio encoder: chunks of all sounds in one sequence."""
    encoder = base.audio_tower
    return Tower(base, encoder, encoder.layers, packed=True, class_token=False)


def _frames(base: Any, call: Call) -> list[int]:
    """Frames of each sound behind the convolution."""
    lengths = call["feature_attention_mask"].sum(-1)
    frames: list[int] = base.audio_tower._get_feat_extract_output_lengths(lengths)[0].tolist()
    return frames


add_adapter(
    Adapter(
        "qwen2_5_omni_thinker",
        layout,
        fold,
        qwen.recover,
        audio_tower=audio_tower,
        media=("image", "video", "audio"),
        mrope=True,
    )
)
