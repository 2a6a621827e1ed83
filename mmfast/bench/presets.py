"""Shapes of public checkpoints, so that a benchmark needs no download.

Sources: the `config.json` of llava-hf/llava-onevision-qwen2-{0.5b,7b}-ov-hf (26 SigLIP-so400m
layers: the checkpoint drops the 27th, whose output the model never used),
Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmfast.core.errors import MmfastError, unknown


@dataclass(frozen=True)
class Preset:
    """One model shape.

    Attributes:
        name: What `--preset` takes.
        family: The transformers model type: `llava_onevision`, `qwen2_5_vl` or `qwen3_vl`.
        vision: Arguments of the vision config.
        text: Arguments of the text config.
        grid: Patches (rows, columns) the tower sees of one frame.
        half: Use bfloat16 on the CPU too: in float32 the weights would not fit 24 GB.
        tied: The output head shares the embedding's weights.
    """

    name: str
    family: str
    vision: Mapping[str, Any]
    text: Mapping[str, Any]
    grid: tuple[int, int]
    half: bool = False
    tied: bool = False
    special: Mapping[str, int] = field(default_factory=dict)


_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "vision_use_head": False,
}
_QWEN2_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}

_ONEVISION_05B = Preset(
    "llava-onevision-0.5b",
    "llava_onevision",
    _SIGLIP,
    {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 152000,
        "rope_parameters": _ROPE,
        "tie_word_embeddings": True,
    },
    grid=(27, 27),
    tied=True,
)
_ONEVISION_7B = Preset(
    "llava-onevision-7b",
    "llava_onevision",
    _SIGLIP,
    {"model_type": "qwen2", **_QWEN2_7B, "vocab_size": 152128, "rope_parameters": _ROPE},
    grid=(27, 27),
    half=True,
)
# What a CPU can hold and time of a 7B shape: two of its layers, with all of its vocabulary.
_ONEVISION_7B_CUT = replace(
    _ONEVISION_7B,
    name="llava-onevision-7b-2-layers",
    text={**_ONEVISION_7B.text, "num_hidden_layers": 2},
    half=False,
)
_QWEN25_7B = Preset(
    "qwen2.5-vl-7b",
    "qwen2_5_vl",
    {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "patch_size": 14,
        "window_size": 112,
        "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
    {
        **_QWEN2_7B,
        "vocab_size": 152064,
        "rope_parameters": {**_ROPE, "mrope_section": [16, 24, 24]},
        "rms_norm_eps": 1e-6,
    },
    # 392 x 784 pixels: 392 tokens per two frames, as many per second as LLaVA-OneVision's 196 each
    grid=(28, 56),
    half=True,
)
_QWEN3_8B = Preset(
    "qwen3-vl-8b",
    "qwen3_vl",
    {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "patch_size": 16,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
    {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    grid=(28, 56),
    half=True,
)
_TINY = Preset(
    "tiny",
    "llava_onevision",
    {
        **_SIGLIP,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 8,
    },
    {
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "rope_parameters": _ROPE,
    },
    grid=(8, 8),
    special={"image_token_index": 510, "video_token_index": 511},
)

_ALL = (_TINY, _ONEVISION_05B, _ONEVISION_7B, _ONEVISION_7B_CUT, _QWEN25_7B, _QWEN3_8B)
PRESETS = {p.name: p for p in _ALL}


def get_preset(name: str) -> Preset:
    """Return the preset called `name`.

    Raises:
        MmfastError: There is none; names the choices and the nearest.
    """
    if name not in PRESETS:
        raise MmfastError(unknown("preset", name, PRESETS))
    return PRESETS[name]
