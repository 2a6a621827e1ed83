"""Qwen3-VL."""

from __future__ import annotations

from typing import Any

from tiny_base import SPECIALS, Family, Shape
from tiny_qwen import CALLS, ROPE, framed, media, sections, token_ids, vision_config
from transformers import (
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = vision_config(text, shape)
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": sections(text),
        "mrope_interleaved": True,
    }
    text = {**text, "head_dim": text["hidden_size"] // text["num_attention_heads"]}
    config = Qwen3VLConfig(
        vision_config={
            **vision,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(shape.deepstack)),
        },
        text_config={**text, "rope_parameters": rope},
        **token_ids(ids),
    )
    parts = media(vision, Qwen3VLVideoProcessor)
    processor = Qwen3VLProcessor(tokenizer=tokenizer, **parts)
    return Qwen3VLForConditionalGeneration(config), processor


def _placeholder(kind: str) -> str:
    """The processor itself writes the frames of a video between timestamps."""
    return framed(kind) if kind == "image" else SPECIALS["video_token"]


FAMILY = Family("qwen3_vl", build, CALLS, placeholder=_placeholder, rope=ROPE)
