"""Shapes of public checkpoints, so that a benchmark needs no download.

Sources: the `config.json` of llava-hf/llava-onevision-qwen2-{0.5b,7b}-ov-hf (26 SigLIP-so400m
layers: the checkpoint drops the 27th, whose output the model never used),
Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmfast.core.errors import MmfastError, unknown


@dataclass(frozen=True)
class Preset:
    """One model shape."""

    name: str  # what `--preset` takes
    family: str  # the transformers model type: `llava_onevision`, `qwen2_5_vl` or `qwen3_vl`
    vision: Mapping[str, Any]  # arguments of the vision config
    text: Mapping[str, Any]  # arguments of the text config
    grid: tuple[int, int]  # patches (rows, columns) the tower sees of one frame
    half: bool = False  # use bfloat16 on the CPU too: in float32 the weights would not fit 24 GB
    tied: bool = False  # the output head shares the embedding's weights
    special: Mapping[str, int] = field(default_factory=dict)


def _table(*names: str) -> Callable[..., dict[str, Any]]:
    return lambda *values, **more: {**dict(zip(names, values, strict=True)), **more}


_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_siglip = _table(*_SIZES, "image_size", "patch_size")
_qwen_tower = _table("hidden_size", "intermediate_size", "depth", "num_heads", "patch_size")
_text = _table(*_SIZES, "num_key_value_heads", "vocab_size")
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN2: dict[str, Any] = {"model_type": "qwen2", "rope_parameters": _ROPE}
_QWEN2_7B = (3584, 18944, 28, 28, 4)
_SIGLIP_PARTS: dict[str, Any] = {"model_type": "siglip_vision_model", "vision_use_head": False}
_SIGLIP = _siglip(1152, 4304, 26, 16, 384, 14, **_SIGLIP_PARTS)

_ONEVISION_05B = Preset(
    "llava-onevision-0.5b",
    "llava_onevision",
    _SIGLIP,
    _text(896, 4864, 24, 14, 2, 152000, **_QWEN2, tie_word_embeddings=True),
    grid=(27, 27),
    tied=True,
)
_ONEVISION_7B = Preset(
    "llava-onevision-7b",
    "llava_onevision",
    _SIGLIP,
    _text(*_QWEN2_7B, 152128, **_QWEN2),
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
_WINDOWS: dict[str, Any] = {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
_MROPE = {**_ROPE, "mrope_section": [16, 24, 24]}
_QWEN25_7B = Preset(
    "qwen2.5-vl-7b",
    "qwen2_5_vl",
    _qwen_tower(1280, 3420, 32, 16, 14, out_hidden_size=3584, tokens_per_second=2, **_WINDOWS),
    _text(*_QWEN2_7B, 152064, rope_parameters=_MROPE, rms_norm_eps=1e-6),
    # 392 x 784 pixels: 392 tokens per two frames, as many per second as LLaVA-OneVision's 196 each
    grid=(28, 56),
    half=True,
)
_DEEPSTACK: dict[str, Any] = {"deepstack_visual_indexes": [8, 16, 24]}
_DEEPSTACK |= {"out_hidden_size": 4096, "num_position_embeddings": 2304}
_MROPE3 = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]}
_QWEN3_8B = Preset(
    "qwen3-vl-8b",
    "qwen3_vl",
    _qwen_tower(1152, 4304, 27, 16, 16, **_DEEPSTACK),
    _text(
        *(4096, 12288, 36, 32, 8, 151936),
        head_dim=128,
        rope_parameters={**_MROPE3, "mrope_interleaved": True},
    ),
    grid=(28, 56),
    half=True,
)
_TINY = Preset(
    "tiny",
    "llava_onevision",
    _siglip(32, 64, 3, 2, 64, 8, **_SIGLIP_PARTS),
    _text(64, 128, 4, 4, 2, 512, **_QWEN2),
    grid=(8, 8),
    special={"image_token_index": 510, "video_token_index": 511},
)

_ALL = (_TINY, _ONEVISION_05B, _ONEVISION_7B, _ONEVISION_7B_CUT, _QWEN25_7B, _QWEN3_8B)
PRESETS = {p.name: p for p in _ALL}


def get_preset(name: str) -> Preset:
    """Return the preset called `name`."""
    if name not in PRESETS:
        raise MmfastError(unknown("preset", name, PRESETS))
    return PRESETS[name]
