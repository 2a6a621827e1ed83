"""FastVLM: the tower of timm, as narrow as it gets."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from transformers import (
    CLIPImageProcessor,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    LlavaProcessor,
)

STRIDE = 64


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    side = shape.image_size or 5 * STRIDE
    widths = (8, 16, 32, 32, 64)
    config = FastVlmConfig(
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "fastvit_mci3",
            "do_pooling": True,
            "hidden_size": 2 * widths[-1],
            "model_args": {
                "inference_mode": True,
                "layers": (1,) * 5,
                "embed_dims": widths,
                "mlp_ratios": (1,) * 5,
            },
        },
        text_config={"model_type": "qwen2", **text},
        image_token_index=ids["image_token"],
        image_seq_length=(side // STRIDE) ** 2,
    )
    square = {"height": side, "width": side}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessor(
            size={"shortest_edge": side}, crop_size=square, do_center_crop=True
        ),
        tokenizer=tokenizer,
        patch_size=STRIDE,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
    )
    return FastVlmForConditionalGeneration(config), processor


FAMILY = Family("fast_vlm", build, {"image": ("pixel_values",)})
