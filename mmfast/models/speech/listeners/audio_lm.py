"""Language models that hear: Qwen3-ASR and Voxtral.

Sound is tokens in the prompt, so `reduce` and `cache` act as `attach` does on any such model. The
processor writes the request for a transcript. Paper: arXiv 2507.13264 (Voxtral).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.trace import Trace
from mmfast.models.loading import speech_family
from mmfast.models.speech.listeners.base import StockListener, arrays

LONGEST_TEXT = 448  # tokens, of half a minute of fast speech


def padded(rows: list[Tensor], left: bool = False, value: float = 0) -> Tensor:
    """Rows of batches of one `[1, …, n]`, padded to the longest."""
    longest = max(row.shape[-1] for row in rows)
    sides = [(longest - row.shape[-1], 0) if left else (0, longest - row.shape[-1]) for row in rows]
    return torch.cat([F.pad(row, s, value=value) for row, s in zip(rows, sides, strict=True)])


class AudioLMListener(StockListener):
    """A stock language model behind an audio encoder; greedy, or with `num_beams`."""

    knobs = frozenset({"max_new_tokens", "num_beams"})

    def write(self, sounds: list[Tensor], how: Mapping[str, Any], trace: Trace) -> list[str]:
        """Write sounds down in one batch."""
        inputs = self.inputs(self.ask(sounds, how))
        own = {name: how[name] for name in ("max_new_tokens", "num_beams") if name in how}
        most = self.model.generation_config.max_new_tokens or LONGEST_TEXT
        asked = {"max_new_tokens": most, "do_sample": False, "num_beams": 1, **own}
        out = self.model.generate(**inputs, **asked)
        return self.read(out[:, inputs["input_ids"].shape[1] :])

    def ask(self, sounds: list[Tensor], how: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a batch of requests for a transcript."""
        raise NotImplementedError

    def read(self, ids: Tensor) -> list[str]:
        """Return the texts of generated ids."""
        return list(self.processor.batch_decode(ids, skip_special_tokens=True))


@speech_family("qwen3_asr", "Qwen3ASRForConditionalGeneration", "processor", "AutoProcessor")
class Qwen3AsrListener(AudioLMListener):
    """Qwen3-ASR, which writes the language first; `prompt` holds words to expect."""

    knobs = AudioLMListener.knobs | {"language", "prompt"}

    def ask(self, sounds: list[Tensor], how: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a batch of requests for a transcript.

        Each sound is read alone: beside a longer one its last mel frames would see zeros where they
        see it mirrored.
        """
        request = {name: how[name] for name in ("language", "prompt") if name in how}
        rows = [self.processor.apply_transcription_request(a, **request) for a in arrays(sounds)]
        ids, seen, mel, mask = (
            [row[name] for row in rows]
            for name in ("input_ids", "attention_mask", "input_features", "input_features_mask")
        )
        return {
            "input_ids": padded(ids, True, self.processor.tokenizer.pad_token_id),
            "attention_mask": padded(seen, True),
            "input_features": padded(mel),
            "input_features_mask": padded(mask),
        }

    def read(self, ids: Tensor) -> list[str]:
        """Return the texts behind their languages."""
        return list(self.processor.decode(ids, return_format="transcription_only"))


@speech_family("voxtral", "VoxtralForConditionalGeneration", "processor", "AutoProcessor")
class VoxtralListener(AudioLMListener):
    """Voxtral, whose tokenizer is that of mistral-common; `language` is a code such as `en`."""

    knobs = AudioLMListener.knobs | {"language"}

    def ask(self, sounds: list[Tensor], how: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs of a batch of requests for a transcript."""
        found: Mapping[str, Any] = self.processor.apply_transcription_request(
            arrays(sounds),
            model_id=self.model.name_or_path,
            language=how.get("language"),
            sampling_rate=self.rate,
            format="wav",
        )
        return found
