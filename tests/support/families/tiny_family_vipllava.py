"""ViP-LLaVA: features of two layers of the tower, side by side."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import vision_config
from tiny_family_llava import build as build_llava
from transformers import VipLlavaConfig, VipLlavaForConditionalGeneration


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = VipLlavaConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        vision_feature_layer=[-1, -2],
    )
    _, processor = build_llava(tokenizer, text, ids, shape)
    return VipLlavaForConditionalGeneration(config), processor


FAMILY = Family("vipllava", build, {"image": ("pixel_values",)})
