"""Ovis2: the overview first, tokens that tell columns from rows between the tiles."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_clip import side
from tiny_family_aya_vision import split
from torch import Tensor
from transformers import (
    Ovis2Config,
    Ovis2ForConditionalGeneration,
    Ovis2ImageProcessor,
    Ovis2Processor,
)

TAGS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
TOKENS = {"image_token": "<IMG_ATOM>", "place": "<image>", **{tag[1:-1]: tag for tag in TAGS}}


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 4 tiles."""
    config = Ovis2Config(
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side(shape),
            "patch_size": shape.patch,
            "vocab_size": 32,
            "hidden_stride": shape.merge,
        },
        text_config={"model_type": "qwen2", **text},
        image_token_id=ids["image_token"],
        visual_indicator_token_ids=[ids[tag[1:-1]] for tag in TAGS],
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    images = Ovis2ImageProcessor(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
    length = (side(shape) // shape.patch // shape.merge) ** 2
    processor = Ovis2Processor(images, tokenizer, image_seq_length=length)
    return Ovis2ForConditionalGeneration(config), processor


def _items(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    return split(output.pooler_output.flatten(0, 1), this, inputs, TAGS[0], TAGS[-1])


def _amend(this: Any, output: Any, ids: Tensor, embeds: Tensor) -> None:
    """The tags have embeddings of the visual vocabulary."""
    tags = this.model.config.visual_indicator_token_ids
    for tag, row in zip(tags, output.visual_indicator_features, strict=True):
        embeds[ids == tag] = row


FAMILY = Family(
    "ovis2",
    build,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: "<image>",
    specials=TOKENS,
    items=_items,
    amend=_amend,
)
