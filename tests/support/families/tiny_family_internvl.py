"""InternVL: tiles and frames go through one argument, and one placeholder stands for both."""

from __future__ import annotations

import re
from typing import Any

from tiny_base import SPECIALS, Family, Shape
from torch import Tensor
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
)

FRAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": SPECIALS["image_token"],
}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    side = shape.image_size or 6 * shape.patch
    length = (side // shape.patch // shape.merge) ** 2
    config = InternVLConfig(
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": shape.patch,
        },
        text_config={"model_type": "qwen2", **text},
        image_token_id=ids["image_token"],
        image_seq_length=length,
        downsample_ratio=1 / shape.merge,
        tie_word_embeddings=False,
    )
    size = {"height": side, "width": side}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, max_patches=4, min_patches=1),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=tokenizer,
        image_seq_length=length,
    )
    return InternVLForConditionalGeneration(config), processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Features of each image and clip of a prompt, read off its text."""
    text = this.processor.tokenizer.decode(inputs["input_ids"][0])
    runs = re.findall(r"(?:Frame(\d+): )?<img>((?:<\|image_pad\|>)+)</img>", text)
    tiles = list(output.pooler_output)
    length = len(tiles[0])
    counts: list[int] = []
    for frame, pads in runs:
        count = pads.count("<|image_pad|>") // length
        if frame and int(frame) > 1:
            counts[-1] += count
        else:
            counts.append(count)
    assert sum(counts) == len(tiles)
    rows = output.pooler_output.flatten(0, 1)
    return list(rows.split([count * length for count in counts]))


FAMILY = Family(
    "internvl",
    build,
    {"image": ("pixel_values",), "video": ("pixel_values",)},
    specials=FRAMED,
    items=_items,
)
