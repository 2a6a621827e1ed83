"""Tiny random models of the stock families, with processors, built offline."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from tiny_base import SPECIALS, Family, Shape, Tiny, finish, tokenizer_of_bytes

__all__ = [
    "ALL_FAMILIES",
    "FAMILIES",
    "RELATIVES",
    "Tiny",
    "build",
    "facts",
    "generate",
    "line_of",
    "mixed_prompt",
    "precise",
    "storing",
    "tiny",
    "video_prompt",
]

# The three that every contract is tested on in depth.
FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
# A new family is a file `tiny_family_<name>.py` and a line here; tests/models/families runs it.
ALL_FAMILIES = (
    "fast_vlm",
    "gemma3",
    "idefics3",
    "internvl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "llava_onevision",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)
# Relatives of those, which test_relatives.py alone runs. A file `tiny_kin_<line>.py` has several:
# `FAMILIES`, a dict by name; each needs its line here.
_KIN = {
    "gemma4": ("gemma4", "gemma4_e"),
    "pixtral": ("lighton_ocr", "llava_pixtral", "mistral3"),
    "squares": (
        "deepseek_vl",
        "janus",
        "llava_next_video",
        "paligemma",
        "paligemma2",
        "video_llava",
        "vipllava",
    ),
    "tiles": (
        "aya_vision",
        "cohere2_vision",
        "got_ocr2",
        "minicpmv4_6",
        "ovis2",
        "perception_lm",
    ),
    "qwen": ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "exaone4_5"),
    "grids": ("video_llama_3", "paddleocr_vl", "hunyuan_vl", "ernie4_5_vl_moe"),
    "omni": ("qwen3_omni_moe_thinker",),
    "glm": ("glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
}
# Gemma 2 of PaliGemma 2 takes no scaled dot products.
RELATIVES = tuple(family for kin in _KIN.values() for family in kin if family != "paligemma2")


def line_of(family: str) -> str | None:
    """The line of relatives that has a family."""
    return next((line for line, kin in _KIN.items() if family in kin), None)


def facts(family: str) -> Family:
    """What tests must know of a family."""
    line = line_of(family)
    if line is not None:
        known: dict[str, Family] = importlib.import_module(f"tiny_kin_{line}").FAMILIES
        return known[family]
    found: Family = importlib.import_module(f"tiny_family_{family}").FAMILY
    return found


def build(family: str, *, attention: str = "sdpa", seed: int = 0, **shape: Any) -> Tiny:
    """A model of `family` with random weights.

    Args:
        family: One of `ALL_FAMILIES` or `RELATIVES`.
        attention: Attention implementation of all parts.
        seed: Of the weights.
        **shape: Fields of `tiny_base.Shape`.
    """
    known, sizes = facts(family), Shape(**shape)
    tokenizer = tokenizer_of_bytes(known.specials)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.width,
        "intermediate_size": 2 * sizes.width,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    specials = {**SPECIALS, **known.specials}
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in specials.items()}
    torch.manual_seed(seed)
    model, processor = known.build(tokenizer, text, ids, sizes)
    model.set_attn_implementation(attention)
    return Tiny(known, finish(model), processor, sizes)


@functools.cache
def tiny(family: str, attention: str = "sdpa", **kwargs: Any) -> Tiny:
    """A model that several tests share; do not change it."""
    return build(family, attention=attention, **kwargs)


@functools.cache
def precise(family: str) -> Tiny:
    """The same model in double precision, for what a rounding error may turn over."""
    this = build(family)
    this.model.double()
    return this


def storing(family: str, spec: str) -> Tiny:
    """A model for a cache of packed numbers: a code that turns over is a whole step."""
    return precise(family) if "quant" in spec or "zip" in spec else tiny(family)


def generate(this: Tiny, inputs: dict[str, Any], tokens: int = 8, **kwargs: Any) -> Any:
    """Stock greedy `generate` that cannot write placeholder ids; with logits per step."""
    if this.model.dtype == torch.float64:
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    options = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "suppress_tokens": this.blocked(),
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with torch.no_grad():
        return this.model.generate(**inputs, **{**options, **kwargs})


def video_prompt(this: Tiny) -> dict[str, Any]:
    """A question about one clip."""
    return this.inputs(["on {video} what?"], videos=this.videos(1))


def mixed_prompt(this: Tiny) -> dict[str, Any]:
    """A question about a clip between two images."""
    return this.inputs(
        ["a {image} b {video} c {image}?"], images=this.images(2), videos=this.videos(1)
    )
