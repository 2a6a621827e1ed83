"""GOT-OCR2: every 4 x 4 patches one token; tiles of an image lie side by side in the prompt."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_family_aya_vision import split
from transformers import (
    GotOcr2Config,
    GotOcr2ForConditionalGeneration,
    GotOcr2ImageProcessor,
    GotOcr2Processor,
)

SIDE = 16  # tokens, which the processor takes for granted


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """A model with pixels for patches, and windows alone: a tile has as many as a real one."""
    side = 4 * SIDE
    config = GotOcr2Config(
        vision_config={
            "hidden_size": 16,
            "output_channels": 8,
            "mlp_dim": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": 1,
            "window_size": 4,
            "global_attn_indexes": [],
        },
        text_config={"model_type": "qwen2", **text},
        image_token_index=ids["image_token"],
        image_seq_length=SIDE * SIDE,
        tie_word_embeddings=False,
    )
    size = {"height": side, "width": side}
    images = GotOcr2ImageProcessor(size=size)
    processor = GotOcr2Processor(images, tokenizer)
    return GotOcr2ForConditionalGeneration(config), processor


FAMILY = Family(
    "got_ocr2",
    build,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: "<img><imgpad></img>",
    specials={"image_token": "<imgpad>", "first": "<img>", "last": "</img>"},
    items=lambda this, output, kind, inputs: split(
        output.pooler_output.flatten(0, 1), this, inputs, "<img>", "</img>"
    ),
)
