"""LLaVA-NeXT-Video: images as LLaVA-NeXT has them, frames pooled 2 x 2."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side, vision_config
from tiny_family_llava_next import FAMILY as NEXT
from tiny_family_llava_next import build as build_next
from transformers import (
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaNextVideoProcessor,
    LlavaNextVideoVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    _, processor = build_next(tokenizer, text, ids, shape)
    square = {"height": side(shape), "width": side(shape)}
    config = LlavaNextVideoConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
    )
    clips = LlavaNextVideoVideoProcessor(size={"shortest_edge": side(shape)}, crop_size=square)
    return LlavaNextVideoForConditionalGeneration(config), LlavaNextVideoProcessor(
        clips,
        processor.image_processor,
        tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


FAMILY = Family(
    "llava_next_video",
    build,
    {**NEXT.calls, "video": ("pixel_values_videos",)},
    content=NEXT.content,
)
