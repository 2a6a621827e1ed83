"""LightOnOCR."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import pixtral_config
from tiny_family_mistral3 import BREAKS
from transformers import (
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LightOnOcrProcessor,
    PixtralImageProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = LightOnOcrConfig(
        vision_config=pixtral_config(shape),
        text_config={**text, "model_type": "qwen3", "head_dim": 8},
        image_token_id=ids["image_token"],
        spatial_merge_size=shape.merge,
        tie_word_embeddings=False,
    )
    side = shape.merge * shape.patch
    images = PixtralImageProcessor(
        size={"longest_edge": 12 * shape.patch}, patch_size={"height": side, "width": side}
    )
    processor = LightOnOcrProcessor(
        images, tokenizer, patch_size=shape.patch, spatial_merge_size=shape.merge
    )
    return LightOnOcrForConditionalGeneration(config), processor


FAMILY = Family("lighton_ocr", build, {"image": ("pixel_values", "image_sizes")}, specials=BREAKS)
