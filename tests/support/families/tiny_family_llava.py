"""LLaVA-1.5."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side, vision_config
from transformers import (
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = LlavaConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    square = {"height": side(shape), "width": side(shape)}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": side(shape)}, crop_size=square, do_center_crop=True
        ),
        tokenizer=tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return LlavaForConditionalGeneration(config), processor


FAMILY = Family("llava", build, {"image": ("pixel_values", "image_sizes")})
