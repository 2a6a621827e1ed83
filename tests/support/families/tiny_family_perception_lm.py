"""Perception LM: a tower of timm, the overview first, as many tiles in each image of a call."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from torch import Tensor
from transformers import (
    PerceptionLMConfig,
    PerceptionLMForConditionalGeneration,
    PerceptionLMImageProcessor,
    PerceptionLMProcessor,
    PerceptionLMVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    side = shape.image_size or 6 * shape.patch
    config = PerceptionLMConfig(
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "do_pooling": False,
            "num_classes": 0,
            "hidden_size": 16,
            "model_args": {
                "embed_dim": 16,
                "depth": shape.depth,
                "num_heads": 2,
                "img_size": [side, side],
                "patch_size": shape.patch,
                "global_pool": "",
                "use_post_transformer_norm": False,
            },
        },
        text_config={"model_type": "llama", **text},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        projector_pooling_ratio=shape.merge,
        vision_use_cls_token=True,
        tie_word_embeddings=False,
    )
    images = PerceptionLMImageProcessor(
        tile_size=side, max_num_tiles=4, vision_input_type="thumb+tile"
    )
    clips = PerceptionLMVideoProcessor(size={"height": side, "width": side})
    processor = PerceptionLMProcessor(
        clips, images, tokenizer, patch_size=shape.patch, pooling_ratio=shape.merge
    )
    return PerceptionLMForConditionalGeneration(config), processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows, images = output.pooler_output, len(inputs["pixel_values"])
    return list(rows.unflatten(0, (images, -1)).flatten(1, 2))


FAMILY = Family("perception_lm", build, {"image": ("pixel_values",)}, items=_items)
