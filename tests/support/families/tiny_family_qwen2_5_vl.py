"""Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_qwen import CALLS, ROPE, framed, media, sections, token_ids, vision_config
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = vision_config(text, shape)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections(text)}
    window = 2 * vision["spatial_merge_size"] * vision["patch_size"]
    config = Qwen2_5_VLConfig(
        vision_config={
            **vision,
            "window_size": window,
            "fullatt_block_indexes": [vision["depth"] - 1],
            "tokens_per_second": 2,
        },
        text_config={**text, "rope_parameters": rope},
        **token_ids(ids),
    )
    parts = media(vision, Qwen2VLVideoProcessor)
    processor = Qwen2_5_VLProcessor(tokenizer=tokenizer, **parts)
    return Qwen2_5_VLForConditionalGeneration(config), processor


FAMILY = Family("qwen2_5_vl", build, CALLS, placeholder=framed, rope=ROPE)
