"""LLaVA with a Pixtral tower: Pixtral-12B as transformers has it."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import pixtral_config
from tiny_family_mistral3 import BREAKS
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    patch = 2 * shape.patch
    config = LlavaConfig(
        vision_config={**pixtral_config(shape), "patch_size": patch},
        text_config={"model_type": "mistral", "sliding_window": None, **text},
        image_token_index=ids["image_token"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    images = PixtralImageProcessor(
        size={"longest_edge": 6 * patch}, patch_size={"height": patch, "width": patch}
    )
    processor = PixtralProcessor(
        images, tokenizer, patch_size=patch, image_token=tokenizer.image_token
    )
    return LlavaForConditionalGeneration(config), processor


FAMILY = Family("llava", build, {"image": ("pixel_values", "image_sizes")}, specials=BREAKS)
