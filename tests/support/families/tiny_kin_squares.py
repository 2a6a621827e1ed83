"""Families whose pictures and frames are squares of one size."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tiny_base import SPECIALS, Family, Shape
from tiny_clip import side, siglip_config, vision_config
from tiny_family_llava import build as build_llava
from tiny_family_llava_next import FAMILY as NEXT
from tiny_family_llava_next import build as build_next
from torch import Tensor
from transformers import (
    DeepseekVLConfig,
    DeepseekVLForConditionalGeneration,
    DeepseekVLImageProcessor,
    DeepseekVLProcessor,
    JanusConfig,
    JanusForConditionalGeneration,
    JanusImageProcessor,
    JanusProcessor,
    LlavaNextVideoConfig,
    LlavaNextVideoForConditionalGeneration,
    LlavaNextVideoProcessor,
    LlavaNextVideoVideoProcessor,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessor,
    VideoLlavaConfig,
    VideoLlavaForConditionalGeneration,
    VideoLlavaImageProcessor,
    VideoLlavaProcessor,
    VideoLlavaVideoProcessor,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from mmfast.models.cache_name import CACHE


# PaliGemma: all tokens of a prompt see each other, positions count from 1.
def build_paligemma(
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


def _positions_paligemma(this: Any, inputs: Any) -> Tensor:
    return torch.arange(1, inputs["input_ids"].shape[1] + 1)


def _mask_paligemma(this: Any, embeds: Tensor, attention: Tensor, visual: Tensor) -> Any:
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


FAMILY_PALIGEMMA = Family(
    "paligemma",
    build_paligemma,
    {"image": ("pixel_values",)},
    mask=_mask_paligemma,
    positions=_positions_paligemma,
    prefix=True,
    nested=True,
    specials={"image_token": "<image>"},
    placeholder=lambda kind: "<image>",
)


# PaliGemma 2: Gemma 2, half of whose layers see a window of what was written, and all images.
FAMILY_PALIGEMMA2 = replace(
    FAMILY_PALIGEMMA,
    build=partial(
        build_paligemma,
        kind="gemma2",
        sliding_window=12,
        query_pre_attn_scalar=8,
        final_logit_softcapping=None,  # the oracle ends with the head
    ),
)


# ViP-LLaVA: features of two layers of the tower, side by side.
def build_vipllava(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    layers = "vision_feature_layer"  # in the plural before 5.23
    config = VipLlavaConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        **{layers if hasattr(VipLlavaConfig, layers) else f"{layers}s": [-1, -2]},
    )
    _, processor = build_llava(tokenizer, text, ids, shape)
    return VipLlavaForConditionalGeneration(config), processor


FAMILY_VIPLLAVA = Family("vipllava", build_vipllava, {"image": ("pixel_values",)})


# DeepSeek-VL.
def build_deepseek_vl(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = DeepseekVLConfig(
        vision_config=siglip_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_id=ids["image_token"],
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    images = DeepseekVLImageProcessor(size=size, min_size=shape.patch)
    tokens = (side(shape) // shape.patch) ** 2
    processor = DeepseekVLProcessor(images, tokenizer, num_image_tokens=tokens)
    return DeepseekVLForConditionalGeneration(config), processor


FAMILY_DEEPSEEK_VL = Family("deepseek_vl", build_deepseek_vl, {"image": ("pixel_values",)})


TAGS_JANUS = {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"}


# Janus, without its way to draw.
def build_janus(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    tokens = (side(shape) // shape.patch) ** 2
    config = JanusConfig(
        vision_config={
            **vision_config(shape),
            "model_type": "janus_vision_model",
            "projection_dim": shape.width,
            "num_image_tokens": tokens,
        },
        vq_config={
            "embed_dim": 4,
            "num_embeddings": 8,
            "latent_channels": 8,
            "base_channels": 32,
            "channel_multiplier": [1],
            "num_res_blocks": 1,
            "projection_dim": 8,
            "image_token_embed_dim": 8,
        },
        text_config={"model_type": "llama", **text},
        image_token_id=ids["image_token"],
        tie_word_embeddings=False,
    )
    size = {"height": side(shape), "width": side(shape)}
    images = JanusImageProcessor(size=size, min_size=shape.patch)
    processor = JanusProcessor(images, tokenizer, num_image_tokens=tokens)
    return JanusForConditionalGeneration(config), processor


FAMILY_JANUS = Family(
    "janus", build_janus, {"image": ("pixel_values",)}, specials={**SPECIALS, **TAGS_JANUS}
)


# LLaVA-NeXT-Video: images as LLaVA-NeXT has them, frames pooled 2 x 2.
def build_llava_next_video(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    _, processor = build_next(tokenizer, text, ids, shape)
    square = {"height": side(shape), "width": side(shape)}
    config = LlavaNextVideoConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=processor.image_processor.image_grid_pinpoints,
    )
    clips = LlavaNextVideoVideoProcessor(size={"shortest_edge": side(shape)}, crop_size=square)
    return LlavaNextVideoForConditionalGeneration(config), LlavaNextVideoProcessor(
        clips,
        processor.image_processor,
        tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


FAMILY_LLAVA_NEXT_VIDEO = Family(
    "llava_next_video",
    build_llava_next_video,
    {**NEXT.calls, "video": ("pixel_values_videos",)},
    content=NEXT.content,
)


# Video-LLaVA: class tokens of frames stand between their patches.
def build_video_llava(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    config = VideoLlavaConfig(
        vision_config=vision_config(shape),
        text_config={"model_type": "llama", **text},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
    )
    sizes = {
        "size": {"shortest_edge": side(shape)},
        "crop_size": {"height": side(shape), "width": side(shape)},
    }
    processor = VideoLlavaProcessor(
        VideoLlavaImageProcessor(**sizes),
        VideoLlavaVideoProcessor(**sizes),
        tokenizer,
        patch_size=shape.patch,
    )
    return VideoLlavaForConditionalGeneration(config), processor


def _items_video_llava(this: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    rows = output.pooler_output
    if kind == "image":
        return list(rows)
    return list(rows.flatten(0, 1).chunk(len(inputs["pixel_values_videos"])))


def _content_video_llava(this: Any, features: Tensor) -> Tensor:
    """The first token of a frame is the class token; images have none."""
    one = 1 + (this.model.config.vision_config.image_size // this.shape.patch) ** 2
    keep = torch.ones(len(features), dtype=torch.bool)
    if len(features) % one == 0:
        keep[::one] = False
    return keep


FAMILY_VIDEO_LLAVA = Family(
    "video_llava",
    build_video_llava,
    {"image": ("pixel_values",), "video": ("pixel_values_videos",)},
    items=_items_video_llava,
    content=_content_video_llava,
)


FAMILIES = {
    "paligemma": FAMILY_PALIGEMMA,
    "paligemma2": FAMILY_PALIGEMMA2,
    "vipllava": FAMILY_VIPLLAVA,
    "deepseek_vl": FAMILY_DEEPSEEK_VL,
    "janus": FAMILY_JANUS,
    "llava_next_video": FAMILY_LLAVA_NEXT_VIDEO,
    "video_llava": FAMILY_VIDEO_LLAVA,
}
