"""Relatives of Qwen3-VL, and EXAONE 4.5, which has the tower of Qwen2.5-VL."""

from __future__ import annotations

from typing import Any

from tiny_base import SPECIALS, Family, Shape
from tiny_qwen import CALLS, ROPE, framed, media, sections, token_ids, vision_config
from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Exaone4_5_Processor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
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


def _hybrid(text: Any) -> dict[str, Any]:
    """Three layers of linear attention and one of full attention by turns, half as many here."""
    kinds = ["linear_attention", "full_attention"] * (text["num_hidden_layers"] // 2)
    return {
        **text,
        "layer_types": kinds,
        "head_dim": text["hidden_size"] // text["num_attention_heads"],
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {**rope(text), "partial_rotary_factor": 1.0},
    }


def hybrid(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = {**vision_config(text, shape), "num_position_embeddings": 64}
    parts = {"vision_config": vision, "text_config": _hybrid(text)}
    config = Qwen3_5Config(**parts, **token_ids(ids))
    return _built(Qwen3_5ForConditionalGeneration, config, tokenizer, vision)


def hybrid_moe(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    vision = {**vision_config(text, shape), "num_position_embeddings": 64}
    text = {**_hybrid(text), **EXPERTS, "shared_expert_intermediate_size": 16}
    del text["intermediate_size"]
    config = Qwen3_5MoeConfig(vision_config=vision, text_config=text, **token_ids(ids))
    return _built(Qwen3_5MoeForConditionalGeneration, config, tokenizer, vision)


def exaone(tokenizer: Any, text: Any, ids: Any, shape: Shape) -> tuple[Any, Any]:
    """Windows alternate with full attention; the tower has windows of its own."""
    vision = {
        **vision_config(text, shape),
        "window_size": 2 * shape.merge * shape.patch,
        "fullatt_block_indexes": [shape.depth - 1],
        "num_key_value_heads": 1,
    }
    text = {**text, "model_type": "exaone4", "sliding_window": 12, "sliding_window_pattern": 2}
    names = {key: ids[key[:-3]] for key in ("image_token_id", "video_token_id")}
    config = Exaone4_5_Config(vision_config=vision, text_config=text, **names)
    parts = media(vision, Qwen2VLVideoProcessor)
    processor = Exaone4_5_Processor(tokenizer=tokenizer, **parts)
    return Exaone4_5_ForConditionalGeneration(config), processor


FAMILIES = {
    name: Family(name, make, CALLS, placeholder=_placeholder, rope=ROPE)
    for name, make in {
        "qwen3_vl_moe": vl_moe,
        "qwen3_5": hybrid,
        "qwen3_5_moe": hybrid_moe,
    }.items()
}
FAMILIES["exaone4_5"] = Family("exaone4_5", exaone, CALLS, placeholder=framed)
