"""Tiny random models of the three stock families, with processors, built offline.

The initialisation is large: with the default one attention is flat, and tests would be blind.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
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
from transformers.video_utils import VideoMetadata

FAMILIES = ("llava_onevision", "qwen2_5_vl", "qwen3_vl")
SPECIALS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}


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
    tokenizer = _tokenizer()
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
        model, processor = _llava(tokenizer, text, ids, patch, depth, image_size or 6 * patch)
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
        build_qwen = _qwen2_5 if family == "qwen2_5_vl" else _qwen3
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


def _tokenizer() -> Any:
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


def _llava(
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


def _qwen2_5(tokenizer: Any, text: Any, ids: Any, vision: Any, _: int) -> tuple[Any, Any]:
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


def _qwen3(tokenizer: Any, text: Any, ids: Any, vision: Any, deepstack: int) -> tuple[Any, Any]:
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
