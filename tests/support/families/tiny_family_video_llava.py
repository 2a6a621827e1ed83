"""Video-LLaVA: class tokens of frames stand between their patches."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import Family, Shape
from tiny_clip import side, vision_config
from torch import Tensor
from transformers import (
    VideoLlavaConfig,
    VideoLlavaForConditionalGeneration,
    VideoLlavaImageProcessor,
    VideoLlavaProcessor,
    VideoLlavaVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = VideoLlavaConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
    )
    sizes = {
        "size": {"shortest_edge": side(shape)},
        "crop_size": {"height": side(shape), "width": side(shape)},
    }
    processor = VideoLlavaProcessor(
        VideoLlavaImageProcessor(**sizes),
        VideoLlavaVideoProcessor(**sizes),
        tokenizer,
        patch_size=shape.patch,
    )
    return VideoLlavaForConditionalGeneration(config), processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows = output.pooler_output
    if kind == "image":
        return list(rows)
    return list(rows.flatten(0, 1).chunk(len(inputs["pixel_values_videos"])))


def _content(this: Any, features: Tensor) -> Tensor:
    """The first token of a frame is the class token; images have none."""
    one = 1 + (this.model.config.vision_config.image_size // this.shape.patch) ** 2
    keep = torch.ones(len(features), dtype=torch.bool)
    if len(features) % one == 0:
        keep[::one] = False
    return keep


FAMILY = Family(
    "video_llava",
    build,
    {"image": ("pixel_values",), "video": ("pixel_values_videos",)},
    items=_items,
    content=_content,
)
