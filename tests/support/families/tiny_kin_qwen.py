"""Relatives of Qwen3-VL."""

from __future__ import annotations

from typing import Any

from tiny_base import SPECIALS, Family, Shape
from tiny_qwen import CALLS, ROPE, framed, media, sections, token_ids, vision_config
from transformers import (
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def rope(text: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": sections(text),
        "mrope_interleaved": True,
    }


def _placeholder(kind: str) -> str:
    """The processor itself writes the frames of a video between timestamps."""
    return framed(kind) if kind == "image" else SPECIALS["video_token"]


def _built(model: Any, config: Any, tokenizer: Any, vision: Any) -> tuple[Any, Any]:
    made = model(config)
    made.set_experts_implementation("eager")  # the others take no double precision
    parts = media(vision, Qwen3VLVideoProcessor)
    return made, Qwen3VLProcessor(tokenizer=tokenizer, **parts)


def vl_moe(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = {
        **vision_config(text, shape),
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": list(range(shape.deepstack)),
    }
    text = {**text, **EXPERTS, "rope_parameters": rope(text)}
    config = Qwen3VLMoeConfig(vision_config=vision, text_config=text, **token_ids(ids))
    return _built(Qwen3VLMoeForConditionalGeneration, config, tokenizer, vision)


FAMILIES = {
    name: Family(name, make, CALLS, placeholder=_placeholder, rope=ROPE)
    for name, make in {"qwen3_vl_moe": vl_moe}.items()
}
