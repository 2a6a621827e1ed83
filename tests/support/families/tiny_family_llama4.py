"""Llama 4: tiles with separators of columns and rows, layers that see a chunk of 64 tokens."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side, vision_config
from tiny_family_aya_vision import split
from torch import Tensor
from transformers import (
    Llama4Config,
    Llama4ForConditionalGeneration,
    Llama4ImageProcessor,
    Llama4Processor,
)

TOKENS = {
    "image_token": "<|patch|>",
    "place": "<|image|>",
    "first": "<|image_start|>",
    "last": "<|image_end|>",
    "column": "<|tile_x_separator|>",
    "row": "<|tile_y_separator|>",
}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = Llama4Config(
        vision_config={
            **vision_config(shape),
            "model_type": "llama4_vision_model",
            "intermediate_size": 64,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
            "vision_output_dim": 16,
            "pixel_shuffle_ratio": 1 / shape.merge,
        },
        text_config={
            **text,
            "model_type": "llama4_text",
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 24,
            "no_rope_layer_interval": 2,
        },
        image_token_index=ids["image_token"],
        boi_token_index=ids["first"],
        eoi_token_index=ids["last"],
    )
    size = {"height": side(shape), "width": side(shape)}
    images = Llama4ImageProcessor(size=size, max_patches=4, resize_to_max_canvas=False)
    processor = Llama4Processor(
        images, tokenizer, patch_size=shape.patch, pixel_shuffle_ratio=1 / shape.merge
    )
    return Llama4ForConditionalGeneration(config), processor


FAMILY = Family(
    "llama4",
    build,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: TOKENS["place"],
    specials=TOKENS,
)
