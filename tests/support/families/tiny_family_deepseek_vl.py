"""DeepSeek-VL."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side, siglip_config
from transformers import (
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLImageProcessor,
    DeepseekVLProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = DeepseekVLConfig(
        vision_config=siglip_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_id=ids["image_token"],
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    images = DeepseekVLImageProcessor(size=size, min_size=shape.patch)
    tokens = (side(shape) // shape.patch) ** 2
    processor = DeepseekVLProcessor(images, tokenizer, num_image_tokens=tokens)
    return DeepseekVLForConditionalGeneration(config), processor


FAMILY = Family("deepseek_vl", build, {"image": ("pixel_values",)})
