"""LFM2-VL: every other decoder layer is a convolution."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import Family, Shape
from transformers import (
    Lfm2VlConfig,
    Lfm2VlForConditionalGeneration,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
)

TOKENS = {
    "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>",
    "image_thumbnail_token": "<|img_thumbnail|>",
    **{f"tile_{r}_{c}": f"<|img_row_{r}_col_{c}|>" for r in (1, 2, 3) for c in (1, 2, 3)},
}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """Images of up to 40 tokens stay whole; larger ones are cut into tiles of 16, and 40 more."""
    kinds = ["conv", "full_attention"]
    patch, merge = shape.patch, shape.merge
    config = Lfm2VlConfig(
        vision_config={
            "model_type": "siglip2_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "num_patches": 64,
            "patch_size": patch,
            "vision_use_head": False,
        },
        text_config={
            **text,
            "model_type": "lfm2",
            "block_auto_adjust_ff_dim": False,
            "layer_types": [kinds[i % 2] for i in range(text["num_hidden_layers"])],
        },
        image_token_id=ids["image_token"],
        downsample_factor=merge,
        projector_hidden_size=32,
    )
    images = Lfm2VlImageProcessor(
        downsample_factor=merge,
        encoder_patch_size=patch,
        tile_size=4 * merge * patch,
        min_image_tokens=4,
        max_image_tokens=40,
        max_tiles=4,
    )
    return Lfm2VlForConditionalGeneration(config), Lfm2VlProcessor(images, tokenizer)


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[torch.Tensor]:
    """Features by image: what stands between a start and an end token."""
    ids, config = inputs["input_ids"].flatten().tolist(), this.model.config
    start, end = map(this.processor.tokenizer.convert_tokens_to_ids, list(TOKENS.values())[:2])
    counts, open_ = [], False
    for token in ids:
        if token == start:
            counts.append(0)
        open_ = token == start or (open_ and token != end)
        counts[-1:] = [counts[-1] + (open_ and token == config.image_token_id)] if counts else []
    return list(torch.cat(list(output.pooler_output)).split(counts))


FAMILY = Family(
    "lfm2_vl",
    build,
    {"image": ("pixel_values", "spatial_shapes", "pixel_attention_mask")},
    specials=TOKENS,
    nested=True,
    items=_items,
)
