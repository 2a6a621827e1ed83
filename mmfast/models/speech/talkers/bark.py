"""Bark: text to semantic, coarse and fine tokens, and EnCodec (suno-ai/bark; no paper)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmfast.core.errors import SpecError, unknown
from mmfast.models.loading import speech_family
from mmfast.models.speech.talkers.base import StockTalker, TalkerOptions


@dataclass(frozen=True)
class BarkOptions(TalkerOptions):
    """Options of Bark.

    `voice` is a preset of the checkpoint; None takes whatever voice the model makes up. The rest
    is of sampling: `do_sample` None keeps the checkpoint's setting, `temperature` is of the
    semantic and coarse tokens, `fine_temperature` of the fine ones, `max_new_tokens` bounds the
    semantic ones (about 50 a second), `min_eos_p` is the probability at which they end.
    """

    voice: str | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    fine_temperature: float | None = None
    max_new_tokens: int | None = None
    min_eos_p: float | None = None


NAMES = {
    "do_sample": ("semantic_do_sample", "coarse_do_sample"),
    "temperature": ("semantic_temperature", "coarse_temperature"),
    "fine_temperature": ("fine_temperature",),
    "max_new_tokens": ("semantic_max_new_tokens",),
    "min_eos_p": ("min_eos_p",),
}


@speech_family("bark", "BarkModel", "processor", reader="AutoProcessor")
class BarkVoice(StockTalker):
    """A `BarkModel` as a speaker, a sentence at a time: its fine stage would see the padding."""

    name, Options, batched = "Bark", BarkOptions, False

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.processor = processor
        self.sample_rate = int(model.generation_config.sample_rate)
        self.voices = tuple(processor.available_voice_presets)

    def _say(self, texts: list[str], how: BarkOptions) -> list[Tensor]:
        if how.voice is not None and how.voice not in self.voices:
            raise SpecError(unknown("voice", how.voice, self.voices or ["None: it has no presets"]))
        inputs = self.processor(
            texts,
            voice_preset=how.voice,
            max_length=self.model.generation_config.semantic_config["max_input_semantic_length"],
        )
        inputs = inputs.to(self.device)
        if "history_prompt" in inputs:
            inputs["history_prompt"] = inputs["history_prompt"].to(self.device)
        given = {
            theirs: getattr(how, ours)
            for ours, names in NAMES.items()
            for theirs in names
            if getattr(how, ours) is not None
        }
        return [self.model.generate(**inputs, **given)[0]]
