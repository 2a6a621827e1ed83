"""LLaVA-OneVision."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from torch import Tensor
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 3 x 3 tiles."""
    patch = shape.patch
    side = shape.image_size or 6 * patch
    grids = [[side * h, side * w] for h in (1, 2, 3) for w in (1, 2, 3)]
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": patch,
            "vision_use_head": False,
        },
        text_config={"model_type": "qwen2", **text},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=grids,
    )
    size = {"height": side, "width": side}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=(side // patch) ** 2,
        vision_feature_select_strategy="full",
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


def _content(this: Any, features: Tensor) -> Tensor:
    """Newline tokens are exactly those equal to the parameter."""
    return ~(features == this.model.model.image_newline).all(-1)


FAMILY = Family(
    "llava_onevision",
    build,
    {
        "image": ("pixel_values", "image_sizes", "batch_num_images"),
        "video": ("pixel_values_videos",),
    },
    content=_content,
)
