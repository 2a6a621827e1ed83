"""Qwen3-Omni: a thinker writes, a talker says frames of codes, code2wav sounds (2509.17765).

The stock `generate` runs them one behind the other and hands sound out at the end. Here words are
told while the thinker writes them and each frame sounds as the talker makes it; the talker begins
when the thinker is done, as the class has it. `code2wav` keeps its state from frame to frame: its
sound is that of all codes at once, also where the stock class begins anew after 300 frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.speech import Sound, Turn
from mmfast.frontends.codecs.base import StackCodec
from mmfast.frontends.codecs.checkpoints import Transformer
from mmfast.frontends.codecs.layers import LayerChain, Pointwise
from mmfast.frontends.codecs.stages import walk
from mmfast.models.loading import speech_family
from mmfast.models.speech.omni import READ, WRITE, PromptWriter, WrittenText
from mmfast.models.speech.talkers.base import (
    DrawnOptions,
    GeneratorState,
    Steps,
    StockTalker,
    named_told,
    set_options,
    stepped,
)


@dataclass(frozen=True)
class Qwen3OmniOptions(DrawnOptions):
    """Options of Qwen3-Omni.

    `voice` is a speaker of the checkpoint; `max_words` tokens and `max_codes` frames at most (12.5
    a second); the others are of the talker's sampling, under their names in `generate`. None keeps
    the setting of the class.
    """

    voice: str | None = None
    max_words: int = 1024
    max_codes: int = 4096
    repetition_penalty: float | None = None


SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty")


@speech_family(
    "qwen3_omni_moe",
    "Qwen3OmniMoeForConditionalGeneration",
    "processor",
    reader="AutoProcessor",
)
class Qwen3OmniVoice(StockTalker):
    """Speaker, listener and chatter over one `Qwen3OmniMoeForConditionalGeneration`."""

    name, Options, sample_rate = "Qwen3-Omni", Qwen3OmniOptions, 24_000

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        if not getattr(model, "has_talker", False):
            raise ModelError(
                "this Qwen3-Omni has no talker; load a checkpoint with enable_audio_output, such "
                "as Qwen3-Omni-30B-A3B-Instruct"
            )
        super().__init__(model, **options)
        self.prompts = PromptWriter(processor, self.device)
        self.codec = code2wav_codec(model.code2wav, self.sample_rate)
        self.voices = tuple(sorted(model.config.talker_config.speaker_id))
        self.end = int(model.config.im_end_token_id)  # of what the thinker writes

    def reply(
        self, pcm: Tensor, rate: int = 16_000, history: Sequence[Turn] = (), **options: Any
    ) -> Iterator[Sound]:
        """Answer speech `[n]`: text as it is written, then sound as it is made."""
        how = self._changed(self.options, options)
        inputs = self.prompts.hear(pcm, rate, history)
        return self._answer(inputs, how, GeneratorState(how.seed, self.device), None)

    def transcribe(self, pcm: Tensor, rate: int = 16_000) -> str:
        """Sound `[n]` to text."""
        inputs = self.prompts.hear(pcm, rate, (), WRITE)
        with GeneratorState(self.options.seed, self.device)(), self._refusing():
            ids = self.model.generate(**inputs, return_audio=False, thinker_eos_token_id=self.end)
        ids = getattr(ids, "sequences", ids)
        return self.prompts.read(ids[0, inputs["input_ids"].shape[1] :].tolist()).strip()

    def _say(self, texts: list[str], how: Qwen3OmniOptions) -> list[Tensor]:
        words = [list(self.prompts.words(text)) for text in texts]
        inputs = self.prompts.ask(READ)
        many = {name: value.expand(len(texts), -1) for name, value in inputs.items()}
        _, found = self.model.generate(**many, **self._settings(how, words))
        return [found.reshape(-1)] if isinstance(found, Tensor) else found

    def _stream(self, text: str, how: Qwen3OmniOptions, random: GeneratorState) -> Iterator[Sound]:
        words = [list(self.prompts.words(text))]
        for sound in self._answer(self.prompts.ask(READ), how, random, words):
            if len(sound.pcm):
                yield sound

    def _answer(
        self, inputs: Any, how: Qwen3OmniOptions, random: GeneratorState, words: Any
    ) -> Iterator[Sound]:
        written, listener = WrittenText(self.prompts), _Listener()
        given = {**self._settings(how, words), "thinker_streamer": listener}
        mouth = self.codec.decoder.start(1)  # at the end it holds back nothing but blanks

        def hooks(steps: Steps) -> Sequence[Any]:
            listener.steps = steps
            return self._hooks(steps)

        with self._refusing():
            for kind, value in stepped(
                lambda: self.model.generate(**inputs, **given), hooks, random
            ):
                if kind == "end":
                    continue
                what, ids = value
                if what == "code":
                    mouth, pcm = self.codec.decoder.step(mouth, ids[:, :, None])
                    sound = self._sound(pcm[0], "", ids[0, :, None].cpu())
                    yield replace(sound, passes=1, tokens=ids.shape[1])
                elif words is None and int(ids) != self.end:
                    written.add(int(ids))
                    if written.fresh:
                        yield replace(self._sound(None, written.take()), passes=1)

    def _settings(self, how: Qwen3OmniOptions, words: list[list[int]] | None) -> dict[str, Any]:
        """Arguments of `generate`; `words` are the tokens that the thinker is given."""
        voice = self.voices[0] if how.voice is None else how.voice
        if voice not in self.voices:
            raise SpecError(unknown("voice", voice, self.voices))
        given = {f"talker_{name}": value for name, value in set_options(how, SAMPLING).items()}
        given |= {"speaker": voice, "talker_max_new_tokens": how.max_codes}
        given |= {"thinker_max_new_tokens": how.max_words, "thinker_eos_token_id": self.end}
        if words is not None:
            given["thinker_max_new_tokens"] = max(map(len, words)) + 1
            given["thinker_logits_processor"] = [GivenWords(words, self.end)]
        return given

    def _hooks(self, steps: Steps) -> Sequence[Any]:
        def spoken(named: dict[str, Any]) -> None:
            if named.get("residual_codes") is not None:
                steps.tell(("code", named["residual_codes"].clone()))

        return [named_told(self.model.talker, steps, spoken)]


class _Listener:
    """A streamer of transformers: tells each word of the thinker, not its prompt."""

    def __init__(self) -> None:
        self.steps: Steps | None = None
        self.begun = False

    def put(self, value: Tensor) -> None:
        """Take the tokens of a step."""
        if self.begun and self.steps is not None:
            self.steps.tell(("word", value.reshape(-1)[0]))
        self.begun = True

    def end(self) -> None:
        """Take note that it is over."""


class GivenWords:
    """A logits processor that leaves one choice: the next of the words given, then the end."""

    def __init__(self, words: list[list[int]], end: int) -> None:
        self.words, self.end, self.count = words, end, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores `[B, V]` of the next word of every row."""
        at, self.count = self.count, self.count + 1
        rows = [row[at] if at < len(row) else self.end for row in self.words]
        only = torch.full_like(scores, -torch.inf)
        return only.scatter(1, torch.tensor(rows, device=scores.device)[:, None], 0.0)


def code2wav_codec(model: Any, rate: int) -> StackCodec:
    """A decoder over Qwen3-Omni's `code2wav`; ModelError where one of its layers sees all."""
    config = model.config
    kinds = set(getattr(config, "layer_types", ["sliding_attention"]))
    if kinds != {"sliding_attention"}:
        raise ModelError(f"cannot stream code2wav with layers {', '.join(sorted(kinds))}")
    past = Transformer(model.pre_transformer)
    across = Pointwise(lambda x: model.pre_transformer.norm(x.transpose(1, 2)).transpose(1, 2))
    blocks = [*(part for each in model.upsample for part in each)]
    for block in model.decoder:
        blocks += [*block.block] if hasattr(block, "block") else [block]
    books = int(config.num_quantizers)

    def lookup(codes: Tensor) -> Tensor:
        found: Tensor = model.code_embedding(codes + model.code_offset[:, : codes.shape[1]])
        return found.mean(1).transpose(1, 2)

    limited = Pointwise(lambda x: x.clamp(-1, 1))
    return StackCodec(
        "code2wav",
        rate,
        int(model.total_upsample),
        books,
        int(config.codebook_size),
        encode=None,
        quantise=lambda x: x,
        lookup=lookup,
        decode=LayerChain([past, across, walk(blocks), limited]),
        like=next(model.parameters()),
        width=int(config.hidden_size),
    )
