"""What the Qwen families share."""

from __future__ import annotations

from typing import Any

from tiny_base import SPECIALS, Shape
from transformers import Qwen2VLImageProcessor

CALLS = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
ROPE = ("image_grid_thw", "video_grid_thw", "mm_token_type_ids", "second_per_grid_ts")


def vision_config(text: Any, shape: Shape) -> dict[str, Any]:
    return {
        "depth": shape.depth,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": shape.patch,
        "spatial_merge_size": shape.merge,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
    }


def framed(kind: str) -> str:
    return f"<|vision_start|>{SPECIALS[f'{kind}_token']}<|vision_end|>"


def token_ids(ids: Any) -> dict[str, int]:
    names = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    return {f"{name}_id": ids[name] for name in names}


def media(vision: Any, video: Any) -> dict[str, Any]:
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


def sections(text: Any) -> list[int]:
    half = text["hidden_size"] // text["num_attention_heads"] // 2
    return [half - 2 * (half // 3), half // 3, half // 3]
