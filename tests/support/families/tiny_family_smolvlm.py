"""SmolVLM."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_idefics import CALLS, SPECIALS, config_of, items, side_of, sizes_of, tokens_of
from transformers import (
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMImageProcessor,
    SmolVLMProcessor,
    SmolVLMVideoProcessor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 2 x 2 tiles; frames are one tile each."""
    size = {"longest_edge": side_of(shape)}
    processor = SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(**sizes_of(shape)),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(
            size=size,
            max_image_size=size,
            video_sampling={"max_frames": 64, "fps": 1, "video_size": size},
        ),
        image_seq_len=tokens_of(shape),
    )
    config = SmolVLMConfig(**config_of(text, ids, shape))
    return SmolVLMForConditionalGeneration(config), processor


FAMILY = Family(
    "smolvlm",
    build,
    {**CALLS, "video": CALLS["image"]},
    placeholder=lambda kind: SPECIALS[f"{kind}_token"],
    specials=SPECIALS,
    items=items,
    nested=True,
)
