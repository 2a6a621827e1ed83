"""Qwen2-VL."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_qwen import CALLS, ROPE, framed, media, sections, token_ids, vision_config
from transformers import (
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose tower has other names for its width than its successors'."""
    vision = vision_config(text, shape)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections(text)}
    config = Qwen2VLConfig(
        vision_config={
            **{k: vision[k] for k in ("depth", "num_heads", "patch_size", "spatial_merge_size")},
            "temporal_patch_size": vision["temporal_patch_size"],
            "embed_dim": vision["hidden_size"],
            "hidden_size": text["hidden_size"],
            "mlp_ratio": 2,
        },
        text_config={**text, "rope_parameters": rope},
        **token_ids(ids),
    )
    parts = media(vision, Qwen2VLVideoProcessor)
    processor = Qwen2VLProcessor(tokenizer=tokenizer, **parts)
    return Qwen2VLForConditionalGeneration(config), processor


FAMILY = Family("qwen2_vl", build, CALLS, placeholder=framed, rope=ROPE)
