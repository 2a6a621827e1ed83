"""PaliGemma: all tokens of a prompt see each other, positions count from 1."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import Family, Shape
from tiny_clip import side, siglip_config
from torch import Tensor
from transformers import (
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mmfast.models.cache_name import CACHE


def build(
    tokenizer: Any, text: Any, ids: Any, shape: Shape, kind: str = "gemma", **more: Any
) -> tuple[Any, Any]:
    head = text["hidden_size"] // text["num_attention_heads"]
    images = SiglipImageProcessor(size={"height": side(shape), "width": side(shape)})
    images.image_seq_length = (side(shape) // shape.patch) ** 2
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    processor = PaliGemmaProcessor(images, tokenizer)  # adds tokens for places
    text = {**text, "head_dim": head, "vocab_size": len(tokenizer)}
    config = PaliGemmaConfig(
        vision_config={**siglip_config(shape), "projection_dim": shape.width},
        text_config={**text, "model_type": kind, **more},
        image_token_index=ids["image_token"],
        projection_dim=shape.width,
        hidden_size=shape.width,
    )
    return PaliGemmaForConditionalGeneration(config), processor


def _positions(this: Any, inputs: Any) -> Tensor:
    return torch.arange(1, inputs["input_ids"].shape[1] + 1)


def _mask(this: Any, embeds: Tensor, attention: Tensor, visual: Tensor) -> Any:
    """What the stock base model hands its text model."""
    given = {
        "config": this.model.get_decoder().config,
        "inputs_embeds": embeds,
        "attention_mask": attention,
        CACHE: None,
        "block_sequence_ids": torch.zeros_like(attention),
    }
    if getattr(given["config"], "sliding_window", None) is None:
        return create_causal_mask(**given)
    return {
        "full_attention": create_causal_mask(**given),
        "sliding_attention": create_sliding_window_causal_mask(**given),
    }


FAMILY = Family(
    "paligemma",
    build,
    {"image": ("pixel_values",)},
    mask=_mask,
    positions=_positions,
    prefix=True,
    nested=True,
    specials={"image_token": "<image>"},
    placeholder=lambda kind: "<image>",
)
