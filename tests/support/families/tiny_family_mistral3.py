"""Mistral 3: a token of text ends every row of an image."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import pixtral_config
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
)

BREAKS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = Mistral3Config(
        vision_config=pixtral_config(shape),
        text_config={"model_type": "mistral", "sliding_window": None, **text},
        image_token_index=ids["image_token"],
        spatial_merge_size=shape.merge,
        tie_word_embeddings=False,
    )
    patch = {"height": shape.patch, "width": shape.patch}
    images = PixtralImageProcessor(size={"longest_edge": 12 * shape.patch}, patch_size=patch)
    processor = PixtralProcessor(
        images,
        tokenizer,
        patch_size=shape.patch,
        spatial_merge_size=shape.merge,
        image_token=tokenizer.image_token,
    )
    return Mistral3ForConditionalGeneration(config), processor


FAMILY = Family("mistral3", build, {"image": ("pixel_values", "image_sizes")}, specials=BREAKS)
