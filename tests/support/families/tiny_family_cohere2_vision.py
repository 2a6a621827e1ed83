"""Command A Vision: a line break behind every tile, the overview last."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side, siglip_config
from tiny_family_aya_vision import cohere, split
from torch import Tensor
from transformers import (
    Cohere2VisionConfig,
    Cohere2VisionForConditionalGeneration,
    Cohere2VisionImageProcessor,
    Cohere2VisionProcessor,
)

TOKENS = {
    "image_token": "<|IMG_PATCH|>",
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = Cohere2VisionConfig(
        vision_config=siglip_config(shape),
        text_config=cohere(text),
        image_token_id=ids["image_token"],
        downsample_factor=shape.merge,
        alignment_intermediate_size=24,
        tie_word_embeddings=False,
    )
    images = Cohere2VisionImageProcessor(
        size={"height": side(shape), "width": side(shape)}, min_patches=1, max_patches=4
    )
    # By this name, the processor has the tokens per side of a tile.
    images.patch_size = side(shape) // shape.patch // shape.merge
    processor = Cohere2VisionProcessor(images, tokenizer)
    return Cohere2VisionForConditionalGeneration(config), processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows = output.pooler_output.flatten(0, 1)
    return split(rows, this, inputs, TOKENS["boi_token"], TOKENS["eoi_token"])


FAMILY = Family(
    "cohere2_vision",
    build,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: TOKENS["image_token"],
    specials=TOKENS,
    items=_items,
)
