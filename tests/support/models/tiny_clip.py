"""What the LLaVA families share: a CLIP tower whose last block and class token are not used."""

from __future__ import annotations

from typing import Any

from tiny_base import Shape


def tower_sizes(shape: Shape) -> dict[str, Any]:
    """Sizes of a small vision tower."""
    return {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": 2,
        "patch_size": shape.patch,
    }


def vision_config(shape: Shape) -> dict[str, Any]:
    own = {"model_type": "clip_vision_model", "image_size": side(shape)}
    return {**tower_sizes(shape), **own}


def side(shape: Shape) -> int:
    """Pixels per side of a tile."""
    return shape.image_size or 6 * shape.patch


def siglip_config(shape: Shape, **more: Any) -> dict[str, Any]:
    """A tower without a class token."""
    config = {**vision_config(shape), "model_type": "siglip_vision_model"}
    return {**config, "vision_use_head": False, **more}


def pixtral_config(shape: Shape) -> dict[str, Any]:
    """A tower for images of up to 12 patches a side."""
    sizes = {"image_size": 12 * shape.patch, "head_dim": 8}
    return {**vision_config(shape), "model_type": "pixtral", **sizes}
