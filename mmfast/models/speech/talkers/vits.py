"""VITS and MMS-TTS: text to sound in one pass (arXiv 2106.06103, 2305.13516)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.models.loading import speech_family
from mmfast.models.speech.talkers.base import StockTalker, TalkerOptions, arguments_of

PACE = 165  # words per minute that a speaking rate of 1 is taken for


@dataclass(frozen=True)
class VitsOptions(TalkerOptions):
    """Options of VITS.

    `voice` is the number of a speaker, None the first; `rate` is words per minute, None the model's
    own.
    `noise_scale` and `noise_scale_duration` are those of its config; 0 makes it deterministic.
    """

    voice: str | None = None
    rate: int | None = None
    noise_scale: float | None = None
    noise_scale_duration: float | None = None


@speech_family("vits", "VitsModel", "tokenizer")
class VitsVoice(StockTalker):
    """A `VitsModel` as a speaker; all sentences of a batch run at once."""

    name, Options = "VITS", VitsOptions

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.tokenizer, self.sample_rate = tokenizer, int(model.config.sampling_rate)
        speakers = int(model.config.num_speakers)
        self.voices = tuple(map(str, range(speakers))) if speakers > 1 else ()

    def left_out(self, text: str) -> list[str]:
        """Return letters and digits of a text that the tokenizer drops."""
        words = self.tokenizer
        if words.phonemize or words.is_uroman:  # which write them in others
            return []
        known = words.get_vocab()
        signs = dict.fromkeys(words.normalize_text(text) if words.normalize else text)
        return [sign for sign in signs if sign.isalnum() and sign not in known]

    def _say(self, texts: list[str], how: VitsOptions) -> list[Tensor]:
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt")
        short = (inputs["attention_mask"].sum(1) <= int(self.tokenizer.add_blank)).tolist()
        if True in short:
            text = texts[short.index(True)]
            raise ModelError(f"VITS has no letter of {text[:40]!r}; write it in its alphabet")
        inputs, given = inputs.to(self.device), {"speaker_id": self._speaker(how)}
        with self._scaled(how):
            if how.rate is not None:
                given["speaking_rate"] = how.rate / PACE * self.model.config.speaking_rate
            if len(texts) == 1:
                return [self.model(**inputs, **given).waveform[0]]
            return self._batch(inputs, given)

    def _batch(self, inputs: Any, given: dict[str, Any]) -> list[Tensor]:
        """Run all up to the vocoder, which would sound the padding into the end of a short one."""
        lengths: list[int] = []

        def measured(_: Any, args: Any) -> None:
            lengths[:] = args[1].sum((1, 2)).long().tolist()  # the mask of the flow

        with self.model.flow.register_forward_pre_hook(measured):
            args, _ = arguments_of(self.model.decoder, lambda: self.model(**inputs, **given))
        latents, speaker = args
        rows = (latents[row : row + 1, :, :n] for row, n in enumerate(lengths))
        return [self.model.decoder(row, speaker)[0, 0] for row in rows]

    def _speaker(self, how: VitsOptions) -> int | None:
        if how.voice is None:
            return 0 if self.voices else None
        if how.voice not in self.voices:
            raise SpecError(unknown("voice", how.voice, self.voices or ["None: it has one voice"]))
        return int(how.voice)

    @contextmanager
    def _scaled(self, how: VitsOptions) -> Iterator[None]:
        """Give the model the noise that is asked for."""
        names = ("noise_scale", "noise_scale_duration")
        before = {name: getattr(self.model, name) for name in names}
        try:
            for name in names:
                if getattr(how, name) is not None:
                    setattr(self.model, name, getattr(how, name))
            yield
        finally:
            for name, value in before.items():
                setattr(self.model, name, value)
