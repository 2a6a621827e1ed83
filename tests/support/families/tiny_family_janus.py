"""Janus, without its way to draw."""

from __future__ import annotations

from typing import Any

from tiny_base import SPECIALS, Family, Shape
from tiny_clip import side, vision_config
from transformers import (
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
)

TAGS = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    tokens = (side(shape) // shape.patch) ** 2
    config = JanusConfig(
        vision_config={
            **vision_config(shape),
            "model_type": "janus_vision_model",
            "projection_dim": shape.width,
            "num_image_tokens": tokens,
        },
        vq_config={
            "embed_dim": 4,
            "num_embeddings": 8,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "projection_dim": 8,
            "image_token_embed_dim": 8,
        },
        text_config={"model_type": "llama", **text},
        image_token_id=ids["image_token"],
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    images = JanusImageProcessor(size=size, min_size=shape.patch)
    processor = JanusProcessor(images, tokenizer, num_image_tokens=tokens)
    return JanusForConditionalGeneration(config), processor


FAMILY = Family("janus", build, {"image": ("pixel_values",)}, specials={**SPECIALS, **TAGS})
