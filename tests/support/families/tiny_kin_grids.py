"""Families whose calls bring grids, with towers unlike that of Qwen."""

from __future__ import annotations

from typing import Any

from tiny_base import Family, Shape
from tiny_qwen import CALLS, ROPE, framed, sections
from transformers import (
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
        video_processor=VideoLlama3VideoProcessor(
            **pixels, merge_size=shape.merge, use_token_compression=False
        ),
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


SIZED = {kind: (*names, f"{kind}_merge_sizes") for kind, names in CALLS.items()}
FAMILIES = {
    "video_llama_3": Family("video_llama_3", video_llama, SIZED, placeholder=framed),
    "paddleocr_vl": Family(
        "paddleocr_vl", paddle, {"image": CALLS["image"]}, placeholder=framed, rope=ROPE
    ),
}
