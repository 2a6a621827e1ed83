"""Idefics3."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_idefics import CALLS, SPECIALS, config_of, items, sizes_of, tokens_of
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
)


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model whose images are cut into up to 2 x 2 tiles."""
    processor = Idefics3Processor(
        image_processor=Idefics3ImageProcessor(**sizes_of(shape)),
        tokenizer=tokenizer,
        image_seq_len=tokens_of(shape),
    )
    config = Idefics3Config(**config_of(text, ids, shape))
    return Idefics3ForConditionalGeneration(config), processor


FAMILY = Family(
    "idefics3",
    build,
    CALLS,
    placeholder=lambda kind: SPECIALS[f"{kind}_token"],
    specials=SPECIALS,
    items=items,
)
