"""GLM-4.1V and its relatives."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from tiny_base import SPECIALS, Family, Shape
from tiny_qwen import CALLS, ROPE, media, sections, vision_config

MARKS = {
    f"{kind}_{end}_token": f"<|{word}_of_{kind}|>"
    for kind in ("image", "video")
    for end, word in (("start", "begin"), ("end", "end"))
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}
SIZES = {"image_size": 32, "intermediate_size": 32}


def build(
    name: str, reader: str, tokenizer: Any, text: Any, ids: Any, shape: Shape
) -> tuple[Any, Any]:
    """`name` begins the names of the model's classes, `reader` those of its processor."""
    vision = {**vision_config(text, shape), **SIZES}
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": sections(text),
        "partial_rotary_factor": 1.0,
    }
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision,
        text_config={**text, **(EXPERTS if "Moe" in name else {}), "rope_parameters": rope},
        **{f"{key}_id": ids[key] for key in ("image_token", "video_token", *MARKS)},
    )
    parts = media(vision, getattr(transformers, f"{reader}VideoProcessor"))
    processor = getattr(transformers, f"{reader}Processor")(tokenizer=tokenizer, **parts)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    model.set_experts_implementation("eager")  # the others take no double precision
    return model, processor


def between_marks(kind: str) -> str:
    return MARKS[f"{kind}_start_token"] + SPECIALS[f"{kind}_token"] + MARKS[f"{kind}_end_token"]


FAMILIES = {
    family: Family(
        family,
        partial(build, name, reader),
        CALLS,
        placeholder=between_marks,
        specials=MARKS,
        rope=ROPE,
        as_images=True,
    )
    for family, name, reader in (
        ("glm4v", "Glm4v", "Glm4v"),
        ("glm4v_moe", "Glm4vMoe", "Glm4v"),
        ("glm46v", "Glm46V", "Glm46V"),
        ("glm_ocr", "GlmOcr", "Glm46V"),
    )
}
