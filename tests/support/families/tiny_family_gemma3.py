"""Gemma 3: every other layer sees a window that is shorter than the tests' prompts."""

from __future__ import annotations

from typing import Any

from tiny_base import SPECIALS, Family, Shape
from torch import Tensor
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3ImageProcessor,
    Gemma3Processor,
)
from transformers.models.gemma3.modeling_gemma3 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from mmfast.models.cache_name import CACHE

BEGIN = "<start_of_image>"
TOKENS = 16  # per image


def build(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    side = shape.image_size or 8 * shape.patch
    head = text["hidden_size"] // text["num_attention_heads"]
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": shape.depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": shape.patch,
            "vision_use_head": False,
        },
        text_config={
            **text,
            "head_dim": head,
            "query_pre_attn_scalar": head,
            "sliding_window": 12,
            "layer_types": [kinds[i % 2] for i in range(text["num_hidden_layers"])],
        },
        mm_tokens_per_image=TOKENS,
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        image_token_index=ids["image_token"],
    )
    images = Gemma3ImageProcessor(size={"height": side, "width": side})
    processor = Gemma3Processor(images, tokenizer, image_seq_length=TOKENS)
    return Gemma3ForConditionalGeneration(config), processor


def _mask(this: Any, embeds: Tensor, attention: Tensor, visual: Tensor) -> Any:
    """What the stock base model hands its text model."""
    return create_masks_for_vision_model(
        config=this.model.get_decoder().config,
        inputs_embeds=embeds,
        attention_mask=attention,
        **{CACHE: None},
        position_ids=None,
        block_sequence_ids=get_block_sequence_ids_for_mask(visual.long()),
    )


FAMILY = Family(
    "gemma3",
    build,
    {"image": ("pixel_values",)},
    placeholder=lambda kind: BEGIN,
    specials={"boi_token": BEGIN, "eoi_token": "<end_of_image>", **SPECIALS},
    nested=True,
    mask=_mask,
    blocks=True,
)
