"""Gemma 4, large and small."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from tiny_base import SPECIALS, Family, Shape, plain_mask
from tiny_clip import tower_sizes
from torch import Tensor
from transformers import (
    Gemma4AudioFeatureExtractor,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4VideoProcessor,
)
from transformers.models.gemma4.modeling_gemma4 import (
    create_masks_for_vision_model,
    get_block_sequence_ids_for_mask,
)

from mmfast.models.cache_name import CACHE

TOKENS_GEMMA4 = {
    **SPECIALS,
    "video_token": "<|video|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}


# Gemma 4: images see forward in layers of windows; keys of the others serve as values.
def build_gemma4(tokenizer: Any, text: Any, ids: Any, shape: Shape, **more: Any) -> tuple[Any, Any]:
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma4Config(
        vision_config={
            **tower_sizes(shape),
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 64,
        },
        text_config={
            **text,
            "head_dim": 8,
            "global_head_dim": 8,
            "sliding_window": 12,
            "layer_types": [kinds[i % 2] for i in range(text["num_hidden_layers"])],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "use_bidirectional_attention": "vision",
            **more,
        },
        audio_config=None,
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        audio_token_id=ids["audio_token"],
        boi_token_id=ids["boi_token"],
        eoi_token_id=ids["eoi_token"],
        tie_word_embeddings=False,
    )
    sizes = {"patch_size": shape.patch, "max_soft_tokens": 70}
    processor = Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**sizes),
        tokenizer,
        Gemma4VideoProcessor(**sizes),
    )
    return Gemma4ForConditionalGeneration(config), processor


def _mask_gemma4(this: Any, embeds: Tensor, attention: Tensor, visual: Tensor) -> Any:
    """What the stock base model hands its text model."""
    return create_masks_for_vision_model(
        config=this.model.get_decoder().config,
        inputs_embeds=embeds,
        attention_mask=attention,
        **{CACHE: None},
        position_ids=None,
        block_sequence_ids=get_block_sequence_ids_for_mask(visual.long(), visual.device),
    )


FAMILY_GEMMA4 = Family(
    "gemma4",
    build_gemma4,
    {
        "image": ("pixel_values", "image_position_ids"),
        "video": ("pixel_values_videos", "video_position_ids", "num_frames_per_video"),
    },
    specials=TOKENS_GEMMA4,
    placeholder=lambda kind: TOKENS_GEMMA4[f"{kind}_token"],
    mask=_mask_gemma4,
    blocks=True,
    windowed=True,
    nested=True,
)


# Gemma 4 E: the last layers read keys of earlier ones, and all get inputs of their own.
FAMILY_GEMMA4_E = replace(
    FAMILY_GEMMA4,
    build=partial(
        build_gemma4,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=300,
        attention_k_eq_v=False,
        use_bidirectional_attention=None,
    ),
    mask=plain_mask,
    blocks=False,
    windowed=False,
)


FAMILIES = {
    "gemma4": FAMILY_GEMMA4,
    "gemma4_e": FAMILY_GEMMA4_E,
}
