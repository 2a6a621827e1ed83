"""What the tiny random models share: tokenizer, prompts, weights, and the facts of a family.

The initialisation is large: with the default one attention is flat, and tests would be blind.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.video_utils import VideoMetadata

SPECIALS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
}
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}


def by_name(method: Any, call: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an encoder under its names; LLaVA-OneVision of 5.17 names clips as images."""
    taken, (old, new) = inspect.signature(method).parameters, (PIXELS["image"], PIXELS["video"])
    renamed = {new: old} if old in taken and new not in taken else {}
    return {renamed.get(name, name): value for name, value in call.items()}


@dataclass(frozen=True)
class Shape:
    """Sizes of a tiny model; a family ignores what it does not have.

    Attributes:
        layers: Decoder layers.
        heads: Attention heads of the decoder.
        kv_heads: Key and value heads of the decoder.
        width: Width of the decoder.
        patch: Pixels per patch side.
        merge: Patches per token side (Qwen, pixel shuffle).
        depth: Blocks of the vision tower.
        deepstack: DeepStack planes, Qwen3-VL only.
        image_size: Side of a tile; None is six patches.
        height: Height of the media this model gets.
        width_px: Width of the media this model gets.
        frames: Frames per clip.
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    width: int = 32
    patch: int = 4
    merge: int = 2
    depth: int = 2
    deepstack: int = 2
    image_size: int | None = None
    height: int = 40
    width_px: int = 56
    frames: int = 4


def _rows(tiny: Any, output: Any, kind: str, inputs: Any) -> list[Tensor]:
    """Most encoders return one tensor per item."""
    return list(output.pooler_output)


def plain_mask(tiny: Any, embeds: Tensor, attention: Tensor, visual: Tensor) -> Any:
    """Most text models make their masks themselves."""
    return attention


def _all(tiny: Any, features: Tensor) -> Tensor:
    """Most families have no separators."""
    return torch.ones(len(features), dtype=torch.bool)


@dataclass(frozen=True)
class Family:
    """What tests must know of a family; one per file `tiny_family_<name>.py`, named `FAMILY`.

    Attributes:
        name: `model_type` of its config.
        build: `(tokenizer, text config, special token ids, shape) -> (model, processor)`.
        calls: Per kind of media (`image`, `video`, `audio`) the processor's outputs that
            `get_<kind>_features` takes.
        placeholder: `(kind) -> str`: what stands for one item in a prompt.
        specials: Further special tokens, by the attribute the processor reads.
        rope: The base model's M-RoPE arguments; () where positions are plain.
        items: `(tiny, encoder output, kind, inputs) -> list of [n, D]`: features of each item.
        amend: `(tiny, encoder output, ids [L], embeddings [L, D])` changes embeddings of text.
        content: `(tiny, features [n, D]) -> bool [n]`: False at separators.
        mask: `(tiny, embeddings [1, L, D], ones [1, L], visual bool [1, L]) -> attention mask` as
            the base model hands it to the text model.
        nested: The processor takes a list of images per prompt.
        as_images: A clip has the placeholder of images.
        blocks: Tokens of an image see each other in both directions.
        windowed: They do so in layers alone that see a window.
        prefix: All tokens of a prompt do.
        positions: `(tiny, inputs of one prompt) -> [3, L]`: stock positions, where `rope` is not
            enough to call for them.
    """

    name: str
    build: Callable[[Any, dict[str, Any], dict[str, int], Shape], tuple[Any, Any]]
    calls: Mapping[str, Sequence[str]]
    placeholder: Callable[[str], str] = lambda kind: SPECIALS[f"{kind}_token"]
    specials: Mapping[str, str] = field(default_factory=dict)
    rope: tuple[str, ...] = ()
    items: Callable[[Any, Any, str, Any], list[Tensor]] = _rows
    amend: Callable[[Any, Any, Tensor, Tensor], None] = lambda *_: None
    content: Callable[[Any, Tensor], Tensor] = _all
    mask: Callable[[Any, Tensor, Tensor, Tensor], Any] = plain_mask
    nested: bool = False
    as_images: bool = False
    blocks: bool = False
    windowed: bool = False
    prefix: bool = False
    positions: Callable[[Any, Any], Tensor] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media it takes."""
        return tuple(self.calls)

    def token(self, config: Any, kind: str) -> int:
        """Id of the placeholder of a kind."""
        name = "image" if self.as_images else kind
        return int(getattr(config, f"{name}_token_id"))


@dataclass
class Tiny:
    """A model, its processor, and prompts for it."""

    facts: Family
    model: Any
    processor: Any
    shape: Shape

    @property
    def family(self) -> str:
        return self.facts.name

    def images(self, count: int, seed: int = 0, size: tuple[int, int] | None = None) -> list[Any]:
        """Random RGB images `[H, W, 3]`."""
        rng = np.random.default_rng(seed)
        size = size or (self.shape.height, self.shape.width_px)
        return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for _ in range(count)]

    def videos(self, count: int, seed: int = 0, frames: int | None = None) -> list[Any]:
        """Random RGB clips `[T, H, W, 3]`."""
        rng = np.random.default_rng(seed + 1000)
        side = (self.shape.height, self.shape.width_px)
        shape = (frames or self.shape.frames, *side, 3)
        return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(count)]

    def sounds(self, count: int, seed: int = 0, seconds: float = 0.5) -> list[Any]:
        """Random mono waveforms at 16 kHz, `[samples]`."""
        rng = np.random.default_rng(seed + 2000)
        return [rng.normal(0, 0.1, int(16000 * seconds)).astype(np.float32) for _ in range(count)]

    def media(self, kind: str, count: int, seed: int = 0) -> dict[str, list[Any]]:
        """`count` items of a kind as an argument of `inputs`."""
        name = {"image": "images", "video": "videos", "audio": "sounds"}[kind]
        return {name: getattr(self, name)(count, seed)}

    def inputs(
        self,
        prompts: list[str],
        images: Any = (),
        videos: Any = (),
        sounds: Any = (),
        **options: Any,
    ) -> dict[str, Any]:
        """Inputs of a left-padded batch; `{image}`, `{video}`, `{audio}` in a prompt are media."""
        texts = list(prompts)
        for kind in self.facts.kinds:
            stand_in = self.facts.placeholder(kind)
            texts = [text.replace(f"{{{kind}}}", stand_in) for text in texts]
        media: dict[str, Any] = {}
        if len(images):
            media["images"] = list(images)
            if self.facts.nested:
                left = iter(images)
                counts = [prompt.count("{image}") for prompt in prompts]
                media["images"] = [[next(left) for _ in range(n)] for n in counts]
        if len(videos):
            fps = options.get("fps", 2.0)
            media["videos"] = list(videos)
            if type(self.processor).__name__ == "SmolVLMProcessor":  # counts by prompt before 5.23
                left = iter(videos)
                counts = [prompt.count("{video}") for prompt in prompts]
                media["videos"] = [[next(left) for _ in range(n)] for n in counts]
            media["video_metadata"] = [
                VideoMetadata(
                    total_num_frames=len(v),
                    fps=fps,
                    duration=len(v) / fps,
                    frames_indices=list(range(len(v))),
                )
                for v in videos
            ]
            media["do_sample_frames"] = False
        if len(sounds):
            media["audio"] = list(sounds)
            media["sampling_rate"] = 16000
        if self.family == "video_llama_3" and len(videos):  # by default it drops tokens of its own
            media["use_token_compression"] = options.get("use_token_compression", False)
        if self.family == "smolvlm" and media and transformers.__version__.startswith("5.20."):
            import pytest

            pytest.skip("SmolVLM of this release cuts tiles by the size of a patch")
        batch = self.processor(text=texts, padding=True, return_tensors="pt", **media)
        legacy = {"pixel_values_images": "pixel_values"}  # of Video-LLaVA
        taken = inspect.signature(self.model.forward).parameters
        if legacy.keys() & batch.keys() and "pixel_values" not in taken:  # before 5.21
            import pytest  # which vLLM's environment has not

            pytest.skip("pictures of Video-LLaVA have another name in this release")
        return {legacy.get(k, k): v for k, v in batch.items() if isinstance(v, torch.Tensor)}

    def blocked(self) -> list[int]:
        """Token ids that a random model must not generate."""
        return list(range(256, len(self.processor.tokenizer)))


def tokenizer_of_bytes(specials: Mapping[str, str]) -> Any:
    """One token per byte, and the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        padding_side="left",
        extra_special_tokens={**SPECIALS, **specials},
    )


def finish(model: Any) -> Any:
    """Random weights large enough that attention is not flat; nothing to train."""
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
