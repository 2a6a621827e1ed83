"""Tiny random models of the three stock families, with processors, built offline.

The initialisation is large: with the default one attention is flat, and tests would be blind.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tiny_families import SPECIALS, llava_onevision, qwen2_5_vl, qwen3_vl, tokenizer_of_bytes
from transformers.video_utils import VideoMetadata

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")


@dataclass
class Tiny:
    """A model, its processor, and prompts for it."""

    family: str
    model: Any
    processor: Any
    sizes: dict[str, int]

    def images(self, count: int, seed: int = 0, size: tuple[int, int] | None = None) -> list[Any]:
        """Random RGB images `[H, W, 3]`."""
        rng = np.random.default_rng(seed)
        size = size or (self.sizes["height"], self.sizes["width"])
        return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]

    def videos(self, count: int, seed: int = 0, frames: int | None = None) -> list[Any]:
        """Random RGB clips `[T, H, W, 3]`."""
        rng = np.random.default_rng(seed + 1000)
        shape = (frames or self.sizes["frames"], self.sizes["height"], self.sizes["width"], 3)
        return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]

    def placeholder(self, kind: str) -> str:
        """What stands for an image or video in a prompt."""
        token = SPECIALS[f"{kind}_token"]
        if self.family == "llava_onevision" or (self.family, kind) == ("qwen3_vl", "video"):
            return token
        return f"<|vision_start|>{token}<|vision_end|>"

    def inputs(self, prompts: list[str], images: Any = (), videos: Any = ()) -> dict[str, Any]:
        """Inputs of a left-padded batch; `{image}` and `{video}` in a prompt are the media."""
        texts = [
            p.replace("{image}", self.placeholder("image")).replace(
                "{video}", self.placeholder("video")
            )
            for p in prompts
        ]
        media: dict[str, Any] = {}
        if len(images):
            media["images"] = list(images)
        if len(videos):
            media["videos"] = list(videos)
            media["video_metadata"] = [
                VideoMetadata(
                    total_num_frames=len(v),
                    fps=2.0,
                    duration=len(v) / 2,
                    frames_indices=list(range(len(v))),
                )
                for v in videos
            ]
            media["do_sample_frames"] = False
        batch = self.processor(text=texts, padding=True, return_tensors="pt", **media)
        return {k: v for k, v in batch.items() if isinstance(v, torch.Tensor)}

    def blocked(self) -> list[int]:
        """Token ids that a random model must not generate."""
        return list(range(256, 256 + len(SPECIALS) + 2))


def build(
    family: str,
    *,
    attention: str = "sdpa",
    layers: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 32,
    patch: int = 4,
    merge: int = 2,
    depth: int = 2,
    deepstack: int = 2,
    image_size: int | None = None,
    height: int = 40,
    width_px: int = 56,
    frames: int = 4,
    seed: int = 0,
) -> Tiny:
    """A model of `family` with random weights.

    Args:
        family: One of `FAMILIES`.
        attention: Attention implementation of all parts.
        layers: Decoder layers.
        heads: Attention heads of the decoder.
        kv_heads: Key and value heads of the decoder.
        width: Width of the decoder.
        patch: Pixels per patch side.
        merge: Patches per token side, Qwen only.
        depth: Blocks of the vision tower.
        deepstack: DeepStack planes, Qwen3-VL only.
        image_size: Side of a tile, LLaVA-OneVision only.
        height: Height of the media this model gets.
        width_px: Width of the media this model gets.
        frames: Frames per clip.
        seed: Of the weights.
    """
    tokenizer = tokenizer_of_bytes()
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": tokenizer.pad_token_id,
    }
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIALS.items()}
    torch.manual_seed(seed)
    if family == "llava_onevision":
        model, processor = llava_onevision(
            tokenizer, text, ids, patch, depth, image_size or 6 * patch
        )
    else:
        vision = {
            "depth": depth,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "patch_size": patch,
            "spatial_merge_size": merge,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
        }
        build_qwen = qwen2_5_vl if family == "qwen2_5_vl" else qwen3_vl
        model, processor = build_qwen(tokenizer, text, ids, vision, deepstack)
    model.set_attn_implementation(attention)
    sizes = {"height": height, "width": width_px, "frames": frames}
    return Tiny(family, _finish(model), processor, sizes)


def _finish(model: Any) -> Any:
    model = model.eval().float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                p.normal_(0.0, 1.0 / p[0].numel() ** 0.5)
            elif "norm" not in name:
                p.normal_(0.0, 0.1)
        model.get_input_embeddings().weight.normal_(0.0, 1.0)
    for p in model.parameters():
        p.requires_grad_(False)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = model.config.get_text_config().pad_token_id
    return model


@functools.cache
def tiny(family: str, attention: str = "sdpa", **kwargs: Any) -> Tiny:
    """A model that several tests share; do not change it."""
    return build(family, attention=attention, **kwargs)


def generate(this: Tiny, inputs: dict[str, Any], tokens: int = 8, **kwargs: Any) -> Any:
    """Stock greedy `generate` that cannot write placeholder ids; with logits per step."""
    options = {
        "max_new_tokens": tokens,
        "do_sample": False,
        "suppress_tokens": this.blocked(),
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with torch.no_grad():
        return this.model.generate(**inputs, **{**options, **kwargs})
