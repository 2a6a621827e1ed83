"""LFM2-Audio: a voice that answers speech in text and sound by turns, reads aloud and writes down.

Sound comes frame by frame as the model says it, through the Mimi whose codes it speaks. Prompts are
those of its training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.speech import Codec, Sound, Turn
from mmfast.frontends.audio.reader import load_audio
from mmfast.models.loading import load_codec, speech_family
from mmfast.models.speech.lfm2_audio import CODES, KIND, Lfm2AudioModel, SoundDraw
from mmfast.models.speech.mimi_weights import load_mimi
from mmfast.models.speech.talkers.base import (
    GeneratorState,
    StockTalker,
    TalkerOptions,
    folder_of,
)

CHAT, HEAR = "Respond with interleaved text and audio.", "Perform ASR."
READ = {
    f"{country}_{kind}": f"Perform TTS. Use the {country.upper()} {kind} voice."
    for country in ("us", "uk")
    for kind in ("male", "female")
}
Parts = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class Lfm2AudioOptions(TalkerOptions):
    """Options of LFM2-Audio.

    `voice` is one of the four it reads aloud with; `temperature` and `top_k` are of codes (0 takes
    the most likely), `text_temperature` and `text_top_k` of text; None is the makers' setting.
    `max_new_tokens` counts text tokens and frames (12.5 a second); `codec` is a Mimi, by directory
    or hub id, None that of the checkpoint, or where it has none "kyutai/mimi".
    """

    voice: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    text_temperature: float | None = None
    text_top_k: int | None = None
    max_new_tokens: int = 512
    codec: str | None = None


@speech_family(KIND, Lfm2AudioModel, "tokenizer")
class Lfm2AudioVoice(StockTalker):
    """Speaker, listener and chatter over one `Lfm2AudioModel`."""

    name, Options, batched, by_sentence = "LFM2-Audio", Lfm2AudioOptions, False, False
    sample_rate, voices = 24_000, tuple(READ)

    def __init__(self, model: Any, tokenizer: Any, **options: Any) -> None:
        from transformers import ParakeetFeatureExtractor

        super().__init__(model, **options)
        self.tokenizer, sound = tokenizer, model.config.preprocessor
        self.rate = int(sound["sample_rate"])
        self.mel = ParakeetFeatureExtractor(
            feature_size=sound["features"],
            sampling_rate=self.rate,
            hop_length=round(sound["window_stride"] * self.rate),
            win_length=round(sound["window_size"] * self.rate),
            n_fft=sound["n_fft"],
        )
        self._codecs: dict[str | None, Codec] = {}

    def reply(
        self, pcm: Tensor, rate: int = 16_000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]`: some text, then the sound of it, and so on."""
        how = self._changed(self.options, options)
        prompt = self._prompt(CHAT, history, self._heard(pcm, rate))
        random, tokens, told = GeneratorState(how.seed, self.device), list[int](), 0
        for piece in self._pieces(prompt, how, random, (1.0, 4), interleaved=True):
            if isinstance(piece, Sound):
                yield piece
                continue
            tokens.append(piece)
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            if len(text) > told and not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield replace(self._sound(None, text[told:]), passes=1)
                told = len(text)

    def transcribe(self, pcm: Tensor, rate: int = 16_000) -> str:
        """Write sound `[n]` down."""
        prompt = self.model.read(self._prompt(HEAR, (), self._heard(pcm, rate)))
        most, tokens = self.options.max_new_tokens, list[int]()
        with self._refusing():
            for token in self.model.generate(prompt, most, SoundDraw(), interleaved=False):
                tokens += token.tolist() if len(token) == 1 else []
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return text.strip()

    def _stream(self, text: str, how: Lfm2AudioOptions, random: GeneratorState) -> Iterator[Sound]:
        voice = self.voices[0] if how.voice is None else how.voice
        if voice not in READ:
            raise SpecError(unknown("voice", voice, self.voices))
        prompt = self._prompt(READ[voice], (), [("text", self._ids(text))])
        for piece in self._pieces(prompt, how, random, (0.8, 64), interleaved=False):
            if isinstance(piece, Sound) and len(piece.pcm):
                yield piece

    def _pieces(
        self,
        parts: Parts,
        how: Lfm2AudioOptions,
        random: GeneratorState,
        usual: tuple[float, int],
        *,
        interleaved: bool,
    ) -> Iterator[int | Sound]:
        """Yield text tokens and sounds; `usual` are temperature and candidates of codes."""
        codec = self._codec(how.codec)
        heat = usual[0] if how.temperature is None else how.temperature
        few = usual[1] if how.top_k is None else how.top_k
        draw = SoundDraw(how.text_temperature, how.text_top_k, heat, few)
        mouth = codec.decoder.start(1)
        prompt = self.model.read(parts)
        steps = self.model.generate(prompt, how.max_new_tokens, draw, interleaved=interleaved)
        while True:
            with random(), self._refusing():
                token = next(steps, None)
            if token is None:
                break
            if len(token) == 1:
                yield int(token)
            elif int(token.max()) < CODES:  # else no sound
                mouth, pcm = codec.decoder.step(mouth, token[None, :, None])
                sound = self._sound(pcm[0], "", token[:, None].cpu())
                yield replace(sound, passes=1, tokens=len(token))
        if len(rest := codec.decoder.finish(mouth)[0]):
            yield self._sound(rest, "")

    def _codec(self, where: str | None) -> Codec:
        if where not in self._codecs:
            folder = folder_of(self.model)
            own = sorted(folder.glob("tokenizer-*.safetensors")) if folder else []
            source = where or (load_mimi(own[0]).to(self.device) if own else "kyutai/mimi")
            codec = load_codec(source, device=self.device, codebooks=self.model.books)
            if codec.size != CODES or codec.sample_rate != self.sample_rate:
                raise ModelError(
                    f"codec {where!r} has {codec.size} codes at {codec.sample_rate} Hz, and "
                    f"LFM2-Audio speaks {CODES} at {self.sample_rate}; give codec='kyutai/mimi'"
                )
            self._codecs[where] = codec
        return self._codecs[where]

    def _heard(self, pcm: Tensor, rate: int) -> Parts:
        sound = load_audio(pcm, self.rate, media_rate=rate)
        given = {"sampling_rate": self.rate, "return_tensors": "pt"}
        return [("sound", self.mel(sound.numpy(), **given)["input_features"][0])]

    def _prompt(self, system: str, history: Sequence[Turn], last: Parts) -> Parts:
        """A conversation whose last turn of the user is `last`, up to where the answer begins."""
        parts = [("text", self._ids("<|startoftext|>", mark=True))]
        parts += self._turn("system", [("text", self._ids(system))])
        for turn in history:
            parts += self._turn(turn.role, [("text", self._ids(turn.text))])
        parts += self._turn("user", last)
        return [*parts, ("text", self._ids("<|im_start|>assistant\n", mark=True))]

    def _turn(self, role: str, content: Parts) -> Parts:
        start = self._ids(f"<|im_start|>{role}\n", mark=True)
        return [("text", start), *content, ("text", self._ids("<|im_end|>\n", mark=True))]

    def _ids(self, text: str, mark: bool = False) -> Tensor:
        """Tokens `[T]`; what is no mark of ours may spell one, and ends nothing."""
        found = self.tokenizer(text, add_special_tokens=False, split_special_tokens=not mark)
        return torch.tensor(found["input_ids"], dtype=torch.long)
