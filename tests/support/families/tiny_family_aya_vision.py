"""Aya Vision: a text tag in front of every tile, the overview last."""

from __future__ import annotations

import re
from typing import Any

import torch
from tiny_base import Family, Shape
from tiny_clip import side, siglip_config
from torch import Tensor
from transformers import (
    AyaVisionConfig,
    AyaVisionForConditionalGeneration,
    AyaVisionProcessor,
    GotOcr2ImageProcessor,
)

TOKENS = {
    "image_token": "<|IMG_PATCH|>",
    "start_of_img_token": "<|START_OF_IMG|>",
    "end_of_img_token": "<|END_OF_IMG|>",
    "place": "<image>",
}


def cohere(text: dict[str, Any]) -> dict[str, Any]:
    """Every other layer sees a window."""
    kinds = ["sliding_attention", "full_attention"]
    layers = [kinds[i % 2] for i in range(text["num_hidden_layers"])]
    return {**text, "model_type": "cohere2", "sliding_window": 12, "layer_types": layers}


def split(features: Tensor, this: Any, inputs: Any, first: str, last: str) -> list[Tensor]:
    """Features `[n, D]` by image, counted in the decoded prompt between two tags."""
    text, mark = this.processor.tokenizer.decode(inputs["input_ids"][0]), this.processor.tokenizer
    images = re.findall(re.escape(first) + "(.*?)" + re.escape(last), text, re.DOTALL)
    counts = [image.count(mark.image_token) for image in images]
    assert sum(counts) == len(features)
    return list(features.split(counts))


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows = torch.cat(list(output.pooler_output))
    return split(rows, this, inputs, TOKENS["start_of_img_token"], TOKENS["end_of_img_token"])


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = AyaVisionConfig(
        vision_config=siglip_config(shape),
        text_config=cohere(text),
        image_token_index=ids["image_token"],
        downsample_factor=shape.merge,
        alignment_intermediate_size=24,
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    processor = AyaVisionProcessor(
        GotOcr2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4),
        tokenizer,
        patch_size=shape.patch,
        img_size=side(shape),
        downsample_factor=shape.merge,
        tile_token="TILE",
    )
    return AyaVisionForConditionalGeneration(config), processor


FAMILY = Family(
    "aya_vision",
    build,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: TOKENS["place"],
    specials=TOKENS,
    items=_items,
)
