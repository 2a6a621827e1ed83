"""LLaVA-NeXT."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side, vision_config
from torch import Tensor
from transformers import (
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into 2 to 4 tiles."""
    tile = side(shape)
    shapes = [(1, 2), (2, 1), (2, 2), (3, 1), (1, 3)]
    grids = [[tile * h, tile * w] for h, w in shapes]
    config = LlavaNextConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "mistral", "sliding_window": None, **text},
        image_token_index=ids["image_token"],
        image_grid_pinpoints=grids,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": tile},
            crop_size={"height": tile, "width": tile},
            image_grid_pinpoints=grids,
        ),
        tokenizer=tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return LlavaNextForConditionalGeneration(config), processor


def _content(this: Any, features: Tensor) -> Tensor:
    """Newline tokens are exactly those equal to the parameter."""
    return ~(features == this.model.model.image_newline).all(-1)


FAMILY = Family("llava_next", build, {"image": ("pixel_values", "image_sizes")}, content=_content)
