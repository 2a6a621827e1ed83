"""Tiny random models of stock classes that hear, and the same tokens removed by hand."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from tiny_base import finish
from torch import Tensor
from transformers import (
    AudioFlamingo3Config,
    AudioFlamingo3ForConditionalGeneration,
    GlmAsrConfig,
    GlmAsrForConditionalGeneration,
    VoxtralConfig,
    VoxtralForConditionalGeneration,
)

AUDIO, FRAMES, MELS = 7, 48, 8  # placeholder id; mel frames of a window; mel bands
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
EAR = {
    "num_mel_bins": MELS,
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
}
CLASSES: dict[str, Any] = {
    "voxtral": (VoxtralForConditionalGeneration, VoxtralConfig, "max_source_positions", 4, False),
    "audioflamingo3": (
        AudioFlamingo3ForConditionalGeneration,
        AudioFlamingo3Config,
        "max_source_positions",
        2,
        True,
    ),
    "glmasr": (GlmAsrForConditionalGeneration, GlmAsrConfig, "max_position_embeddings", 4, True),
}


@dataclass(frozen=True)
class Hearer:
    """A model, and how many frames behind the convolutions make one of its tokens."""

    family: str
    model: Any
    joined: int
    masked: bool

    def inputs(self, rows: list[list[int]], seed: int = 0) -> dict[str, Any]:
        """A left-padded batch; a row lists the mel frames of its sounds, text in between."""
        generator = torch.Generator().manual_seed(seed)
        sounds = [n for row in rows for n in row]
        mel = torch.randn(len(sounds), MELS, FRAMES, generator=generator)
        texts = [self._ids(row, number) for number, row in enumerate(rows)]
        longest = max(map(len, texts))
        ids = torch.tensor([[0] * (longest - len(t)) + t for t in texts])
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long(), "input_features": mel}
        if self.masked:
            have = torch.tensor(sounds)[:, None]
            inputs["input_features_mask"] = (torch.arange(FRAMES) < have).long()
        return inputs

    def tokens(self, frames: int) -> int:
        """Tokens of a sound of so many mel frames."""
        return ((frames if self.masked else FRAMES) + 1) // 2 // self.joined

    def _ids(self, row: list[int], number: int) -> list[int]:
        ids = [10 + number]
        for frames in row:
            ids += [AUDIO] * self.tokens(frames) + [20 + number, 21, 22]
        return ids


@functools.cache
def hearer(family: str) -> Hearer:
    """A random model of a family."""
    model_class, config_class, positions, joined, masked = CLASSES[family]
    torch.manual_seed(0)
    ear = {**EAR, positions: FRAMES // 2}
    model = model_class(config_class(audio_config=ear, text_config=TEXT, audio_token_id=AUDIO))
    return Hearer(family, finish(model), joined, masked)


def embedded(this: Hearer, inputs: dict[str, Any]) -> Tensor:
    """Embeddings `[L, D]` of a batch of one, sound in its places."""
    model, ids = this.model, inputs["input_ids"][0]
    call = {k: v for k, v in inputs.items() if k.startswith("input_features")}
    embeds: Tensor = model.get_input_embeddings()(ids).clone()
    embeds[ids == AUDIO] = model.model.get_audio_features(**call, return_dict=True).pooler_output
    return embeds


def without(this: Hearer, embeds: Tensor, keep: Tensor, contiguous: bool = False) -> Tensor:
    """Logits `[M, V]` of the stock language model on tokens that were kept where they stood."""
    positions = torch.arange(len(keep)) if contiguous else keep
    out = this.model.model.language_model(
        inputs_embeds=embeds[keep][None],
        position_ids=positions[None],
        attention_mask=torch.ones(1, len(keep), dtype=torch.int64),  # else a gap ends a sequence
        use_cache=False,
    )
    logits: Tensor = this.model.lm_head(out.last_hidden_state[0])
    return logits
