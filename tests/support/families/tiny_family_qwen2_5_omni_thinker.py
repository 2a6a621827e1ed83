"""Qwen2.5-Omni, the thinker."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import SPECIALS, Family, Shape
from tiny_qwen import CALLS, media, sections, vision_config
from torch import Tensor
from transformers import (
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)
from transformers.models.qwen2_5_omni.processing_qwen2_5_omni import Qwen2_5OmniProcessorKwargs

SOUND = {
    "audio_token": "<|AUDIO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
MELS, FRAMES = 8, 40  # mel bands; frames of a chunk that the audio encoder attends over


def sound_config(text: Any, shape: Shape) -> dict[str, Any]:
    """Sizes of a small audio encoder."""
    return {
        "num_mel_bins": MELS,
        "encoder_layers": shape.depth,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "d_model": 16,
        "output_dim": text["hidden_size"],
    }


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = vision_config(text, shape)
    config = Qwen2_5OmniThinkerConfig(
        audio_config={
            **sound_config(text, shape),
            "n_window": FRAMES // 2,
            "max_source_positions": FRAMES,
        },
        vision_config={
            **vision,
            "window_size": 2 * vision["spatial_merge_size"] * vision["patch_size"],
            "fullatt_block_indexes": [vision["depth"] - 1],
            "tokens_per_second": 2,
        },
        text_config={
            **text,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": sections(text),
            },
        },
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        audio_start_token_id=ids["audio_bos_token"],
        audio_end_token_id=ids["audio_eos_token"],
        position_id_per_seconds=25,
        seconds_per_chunk=2,
    )
    processor = Qwen2_5OmniProcessor(
        tokenizer=tokenizer,
        feature_extractor=WhisperFeatureExtractor(feature_size=MELS, chunk_length=2),
        **media(vision, Qwen2VLVideoProcessor),
    )
    processor.videos_kwargs = {}  # else frames of at least 100,000 pixels, as before 5.23, too:
    getattr(Qwen2_5OmniProcessorKwargs, "_defaults", {}).get("videos_kwargs", {}).pop("size", None)
    return Qwen2_5OmniThinkerForConditionalGeneration(config), processor


def _placeholder(kind: str) -> str:
    if kind == "audio":
        return "".join(SOUND[f"audio{part}"] for part in ("_bos_token", "_token", "_eos_token"))
    return f"<|vision_bos|>{SPECIALS[f'{kind}_token']}<|vision_eos|>"


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Sounds come joined: 100 frames a second, two strides of two."""
    if kind != "audio":
        return list(output.pooler_output)
    frames = inputs["feature_attention_mask"].sum(-1).tolist()
    return list(output.pooler_output.split([((n + 1) // 2) // 2 for n in frames]))


def _positions(this: Any, inputs: Any) -> Tensor:
    """Stock positions; the arguments have other names than the processor's outputs."""
    sounds = inputs.get("feature_attention_mask")
    positions: Tensor = this.model.get_rope_index(
        inputs["input_ids"],
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        torch.ones_like(inputs["input_ids"]),
        bool(inputs.get("use_audio_in_video", False)),
        None if sounds is None else sounds.sum(-1),
        inputs.get("video_second_per_grid"),
    )[0][:, 0]
    return positions


FAMILY = Family(
    "qwen2_5_omni_thinker",
    build,
    {**CALLS, "audio": ("input_features", "feature_attention_mask")},
    placeholder=_placeholder,
    specials=SOUND,
    items=_items,
    positions=_positions,
)
