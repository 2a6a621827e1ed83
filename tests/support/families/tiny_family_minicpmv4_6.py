"""MiniCPM-V 4.6: up to 4 slices behind an overview, without its linear attention."""

from __future__ import annotations

import re
from typing import Any

import torch
from tiny_base import SPECIALS, Family, Shape
from torch import Tensor
from transformers import (
    MiniCPMV4_6Config,
    MiniCPMV4_6ForConditionalGeneration,
    MiniCPMV4_6ImageProcessor,
    MiniCPMV4_6Processor,
    MiniCPMV4_6VideoProcessor,
)

TOKENS = {
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    side = 8 * shape.patch
    config = MiniCPMV4_6Config(
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": shape.patch,
            "insert_layer_id": 0,
        },
        text_config={"model_type": "qwen3", "head_dim": 8, **text},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        image_size=side,
        insert_layer_id=0,
    )
    sizes = {"scale_resolution": side, "patch_size": shape.patch, "max_slice_nums": 4}
    processor = MiniCPMV4_6Processor(
        MiniCPMV4_6ImageProcessor(**sizes), MiniCPMV4_6VideoProcessor(**sizes), tokenizer
    )
    return MiniCPMV4_6ForConditionalGeneration(config), processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Features by item: every one has a number in front of it."""
    text = this.processor.tokenizer.decode(inputs["input_ids"][0])
    parts = re.split("<image_id>", text)[1:]
    counts = [part.count(SPECIALS[f"{kind}_token"]) for part in parts]
    return list(torch.cat(list(output.pooler_output)).split([n for n in counts if n]))


FAMILY = Family(
    "minicpmv4_6",
    build,
    {
        "image": ("pixel_values", "target_sizes"),
        "video": ("pixel_values_videos", "target_sizes_videos"),
    },
    specials=TOKENS,
    items=_items,
)
