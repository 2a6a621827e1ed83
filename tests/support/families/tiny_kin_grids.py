"""Families whose calls bring grids, with towers unlike that of Qwen."""

from __future__ import annotations

from typing import Any

import torch
from tiny_base import Family, Shape
from tiny_kin_glm import MARKS, between_marks
from tiny_qwen import CALLS, ROPE, framed, sections
from torch import Tensor
from transformers import (
    Ernie4_5_VLMoeConfig,
    Ernie4_5_VLMoeForConditionalGeneration,
    Ernie4_5_VLMoeImageProcessor,
    Ernie4_5_VLMoeProcessor,
    Ernie4_5_VLMoeVideoProcessor,
    HunYuanVLConfig,
    HunYuanVLForConditionalGeneration,
    HunYuanVLImageProcessor,
    HunYuanVLProcessor,
    PaddleOCRVLConfig,
    PaddleOCRVLForConditionalGeneration,
    PaddleOCRVLImageProcessor,
    PaddleOCRVLProcessor,
    VideoLlama3Config,
    VideoLlama3ForConditionalGeneration,
    VideoLlama3ImageProcessor,
    VideoLlama3Processor,
    VideoLlama3VideoProcessor,
)

PIXELS = {"shortest_edge": 16, "longest_edge": 10**6}


def tower(shape: Shape) -> dict[str, Any]:
    return {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": 2,
        "patch_size": shape.patch,
    }


def video_llama(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """Patches of a picture are tokens as they are; in a clip four of them make one."""
    config = VideoLlama3Config(
        vision_config=tower(shape),
        text_config={**text, "model_type": "qwen2"},
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
    )
    pixels = {"size": PIXELS, "patch_size": shape.patch}
    processor = VideoLlama3Processor(
        image_processor=VideoLlama3ImageProcessor(**pixels, merge_size=1),
        video_processor=VideoLlama3VideoProcessor(**pixels, merge_size=shape.merge),
        tokenizer=tokenizer,
    )
    return VideoLlama3ForConditionalGeneration(config), processor


def paddle(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections(text)}
    head = text["hidden_size"] // text["num_attention_heads"]
    config = PaddleOCRVLConfig(
        vision_config={**tower(shape), "image_size": 32, "spatial_merge_size": shape.merge},
        text_config={**text, "head_dim": head, "rope_parameters": rope},
        tie_word_embeddings=False,
        **{f"{key}_id": ids[key] for key in ("image_token", "video_token")},
    )
    images = PaddleOCRVLImageProcessor(size=PIXELS, patch_size=shape.patch, merge_size=shape.merge)
    processor = PaddleOCRVLProcessor(image_processor=images, tokenizer=tokenizer)
    return PaddleOCRVLForConditionalGeneration(config), processor


def hunyuan(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """Positions have four axes."""
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [half - 3 * (half // 4), *[half // 4] * 3],
    }
    head = text["hidden_size"] // text["num_attention_heads"]
    config = HunYuanVLConfig(
        vision_config={
            **tower(shape),
            "spatial_merge_size": shape.merge,
            "max_image_size": 16 * shape.patch,
        },
        text_config={
            **text,
            "head_dim": head,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
        tie_word_embeddings=False,
        image_token_id=ids["image_token"],
        im_start_id=ids["image_start_token"],
        im_end_id=ids["image_end_token"],
    )
    images = HunYuanVLImageProcessor(size=PIXELS, patch_size=shape.patch, merge_size=shape.merge)
    processor = HunYuanVLProcessor(image_processor=images, tokenizer=tokenizer)
    return HunYuanVLForConditionalGeneration(config), processor


def ernie(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """Experts of their own for text and for media, behind a dense layer."""
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    rope = {"rope_type": "default", "rope_theta": 1e4}
    vision = {
        **{key: value for key, value in tower(shape).items() if not key.startswith("num_")},
        "depth": shape.depth,
        "num_heads": 2,
        "spatial_merge_size": shape.merge,
    }
    config = Ernie4_5_VLMoeConfig(
        vision_config=vision,
        text_config={
            **text,
            "moe_k": 2,
            "moe_num_experts": 4,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": [16, 8],
            "rope_parameters": {**rope, "mrope_section": [half // 4, half // 4, half // 2]},
            "tie_word_embeddings": False,
        },
        tie_word_embeddings=False,
        **{f"{key}_id": ids[key] for key in ("image_token", "video_token", *MARKS)},
    )
    pixels = {"size": PIXELS, "patch_size": shape.patch, "merge_size": shape.merge}
    processor = Ernie4_5_VLMoeProcessor(
        image_processor=Ernie4_5_VLMoeImageProcessor(**pixels),
        video_processor=Ernie4_5_VLMoeVideoProcessor(**pixels, draw_on_frames=False, min_frames=2),
        tokenizer=tokenizer,
    )
    model = Ernie4_5_VLMoeForConditionalGeneration(config)
    model.set_experts_implementation("eager")  # the others take no double precision
    return model, processor


def _content(this: Any, features: Tensor) -> Tensor:
    """False at the marks around an image and at newlines, which are the same in every image."""
    merger = this.model.base_model.vision_tower.patch_merger
    lines = [merger.mlp(merger.image_newline), merger.image_begin, merger.image_end]
    marks = merger.after_rms(torch.stack(lines))
    return ((features[:, None] - marks).abs().amax(-1) > 1e-5).all(-1)


SIZED = {kind: (*names, f"{kind}_merge_sizes") for kind, names in CALLS.items()}
FAMILIES = {
    "video_llama_3": Family("video_llama_3", video_llama, SIZED, placeholder=framed),
    "paddleocr_vl": Family(
        "paddleocr_vl", paddle, {"image": CALLS["image"]}, placeholder=framed, rope=ROPE
    ),
    "hunyuan_vl": Family(
        "hunyuan_vl",
        hunyuan,
        {"image": CALLS["image"]},
        placeholder=between_marks,
        specials=MARKS,
        rope=("image_grid_thw", "mm_token_type_ids"),
        content=_content,
    ),
    "ernie4_5_vl_moe": Family(
        "ernie4_5_vl_moe", ernie, CALLS, placeholder=between_marks, specials=MARKS, rope=ROPE
    ),
}
