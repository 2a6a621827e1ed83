"""SeamlessM4T v2: text in one language to speech in another, or in its own (arXiv 2312.05187)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.models.loading import speech_family
from mmfast.models.speech.talkers.base import StockTalker, TalkerOptions


@dataclass(frozen=True)
class SeamlessOptions(TalkerOptions):
    """Options of SeamlessM4T v2.

    `voice` is the number of a speaker; `language` is spoken, `source` is that of the text, None the
    same, as codes such as `eng`. `num_beams`, `do_sample` and `temperature` are of the words.
    """

    voice: str = "0"
    language: str = "eng"
    source: str | None = None
    num_beams: int = 1
    do_sample: bool = False
    temperature: float = 1.0


TONGUES = ("vocoder_lang_code_to_id", "text_decoder_lang_to_code_id")


@speech_family("seamless_m4t_v2", "SeamlessM4Tv2ForTextToSpeech", "tokenizer")
class SeamlessVoice(StockTalker):
    """A `SeamlessM4Tv2ForTextToSpeech` as a speaker.

    It says a sentence at a time: in a batch the class leaves the end of shorter texts in.
    """

    name, Options, batched = "SeamlessM4T v2", SeamlessOptions, False

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.tokenizer, self.sample_rate = tokenizer, int(model.config.sampling_rate)
        self.voices = tuple(map(str, range(int(model.config.vocoder_num_spkrs))))
        self.languages, self.sources = (self._codes(name) for name in TONGUES)

    def _say(self, texts: list[str], how: SeamlessOptions) -> list[Tensor]:
        if how.voice not in self.voices:
            raise SpecError(unknown("voice", how.voice, self.voices))
        source = how.source or how.language
        for name, code, codes in (
            ("language", how.language, self.languages),
            ("source", source, self.sources),
        ):
            if code not in codes:
                raise SpecError(unknown(name, code, codes))
        inputs = self.tokenizer(texts, src_lang=source, return_tensors="pt").to(self.device)
        sampling = {"text_do_sample": True, "text_temperature": how.temperature}
        found, lengths = self.model.generate(
            **inputs,
            tgt_lang=how.language,
            speaker_id=int(how.voice),
            text_num_beams=how.num_beams,
            **(sampling if how.do_sample else {"text_do_sample": False}),
        )
        return [found.reshape(-1)[: int(lengths)]]

    def _codes(self, name: str) -> list[str]:
        found = getattr(self.model.generation_config, name, None)
        if not found:
            raise ModelError(
                f"this SeamlessM4T v2 has no {name} in generation_config.json, so it cannot speak; "
                "load the whole checkpoint"
            )
        return sorted(found)
