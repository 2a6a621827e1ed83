"""Dia: text of dialogues to codes of DAC, nine books with a delay each (nari-labs/dia)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmfast.models.loading import speech_family
from mmfast.models.speech.talkers.base import DrawnOptions, GeneratingTalker

MARK = "[S1] "  # text begins with a speaker
MARKS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class DiaOptions(DrawnOptions):
    """Options of Dia.

    `voice` is a recording to go on from and `voice_text` what it says, with speakers `[S1]` and
    `[S2]`. `guidance_scale` is of sampling too, `temperature` 1 at least, `max_new_tokens` frames
    at most (86 a second).
    """

    voice: str | None = None
    voice_text: str = ""
    guidance_scale: float | None = None
    max_new_tokens: int | None = None


@speech_family("dia", "DiaForConditionalGeneration", "processor", reader="AutoProcessor")
class DiaVoice(GeneratingTalker):
    """A `DiaForConditionalGeneration` as a speaker; sentences of a batch are generated at once."""

    name, Options = "Dia", DiaOptions
    settings = ("guidance_scale", "temperature", "top_p", "top_k", "do_sample", "max_new_tokens")

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        super().__init__(model, processor, **options)
        processor.audio_tokenizer.to(self.device).eval()
        self.sample_rate = int(processor.feature_extractor.sampling_rate)
        books = model.config.decoder_config
        self.layout = {name: getattr(books, name) for name in MARKS}
        self.layout["delay_pattern"] = model.config.delay_pattern

    def _say(self, texts: list[str], how: DiaOptions) -> list[Tensor]:
        marked = [text if text.startswith("[S") else MARK + text for text in texts]
        heard, before = self._recording(how.voice, len(texts)), None
        if heard:
            marked = [f"{how.voice_text} {text}".strip() for text in marked]
        inputs = self.processor(text=marked, **heard, **self.layout, return_tensors="pt")
        if heard:
            mask = inputs["decoder_attention_mask"]
            before = self.processor.get_audio_prompt_len(mask, **self.layout)
        inputs = inputs.to(self.device)
        codes = self._generate(inputs, how)
        found = self.processor.batch_decode(codes, audio_prompt_len=before, **self.layout)
        return [pcm.reshape(-1) for pcm in found]
