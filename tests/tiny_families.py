"""Configurations and processors of the tiny models, one function per family."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIALS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}


def tokenizer_of_bytes() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        extra_special_tokens=SPECIALS,
    )


def llava_onevision(
    tokenizer: Any, text: Any, ids: Any, patch: int, depth: int, side: int
) -> tuple[Any, Any]:
    grids = [[side * h, side * w] for h in (1, 2, 3) for w in (1, 2, 3)]
    config = LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": depth,
            "num_attention_heads": 2,
            "image_size": side,
            "patch_size": patch,
            "vision_use_head": False,
        },
        text_config={"model_type": "qwen2", **text},
        image_token_index=ids["image_token"],
        video_token_index=ids["video_token"],
        image_grid_pinpoints=grids,
    )
    size = {"height": side, "width": side}
    processor = LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=grids),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=tokenizer,
        num_image_tokens=(side // patch) ** 2,
        vision_feature_select_strategy="full",
    )
    return LlavaOnevisionForConditionalGeneration(config), processor


def _qwen_ids(ids: Any) -> dict[str, int]:
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    return {f"{name}_id": ids[name] for name in names}


def _qwen_media(vision: Any, video: Any) -> dict[str, Any]:
    pixels = {"shortest_edge": 16, "longest_edge": 10**6}
    patches = {
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": 2,
    }
    return {
        "image_processor": Qwen2VLImageProcessor(size=pixels, **patches),
        "video_processor": video(size=pixels, **patches),
    }


def _mrope(text: Any) -> list[int]:
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def qwen2_5_vl(tokenizer: Any, text: Any, ids: Any, vision: Any, _: int) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": _mrope(text)}
    window = 2 * vision["spatial_merge_size"] * vision["patch_size"]
    config = Qwen2_5_VLConfig(
        vision_config={
            **vision,
            "window_size": window,
            "fullatt_block_indexes": [vision["depth"] - 1],
            "tokens_per_second": 2,
        },
        text_config={**text, "rope_parameters": rope},
        **_qwen_ids(ids),
    )
    media = _qwen_media(vision, Qwen2VLVideoProcessor)
    processor = Qwen2_5_VLProcessor(tokenizer=tokenizer, **media)
    return Qwen2_5_VLForConditionalGeneration(config), processor


def qwen3_vl(tokenizer: Any, text: Any, ids: Any, vision: Any, deepstack: int) -> tuple[Any, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": _mrope(text),
        "mrope_interleaved": True,
    }
    text = {**text, "head_dim": text["hidden_size"] // text["num_attention_heads"]}
    config = Qwen3VLConfig(
        vision_config={
            **vision,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": list(range(deepstack)),
        },
        text_config={**text, "rope_parameters": rope},
        **_qwen_ids(ids),
    )
    media = _qwen_media(vision, Qwen3VLVideoProcessor)
    processor = Qwen3VLProcessor(tokenizer=tokenizer, **media)
    return Qwen3VLForConditionalGeneration(config), processor
