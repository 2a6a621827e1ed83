"""Higgs Audio v2: text to eight books of codes, each a frame behind the one before.

The stock `generate` hands all of them out at the end. Here each row of codes is taken from the call
as it is made, and its sound comes as soon as the last book of a frame is there: seven rows and the
decoder's look-ahead after it began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.speech import Sound
from mmfast.models.loading import load_codec, speech_family
from mmfast.models.speech.talkers.base import (
    DrawnOptions,
    GeneratingTalker,
    GeneratorState,
    Steps,
    named_told,
)

TASK = "Generate audio following instruction."  # the system prompt of its training


@dataclass(frozen=True)
class HiggsOptions(DrawnOptions):
    """Options of Higgs Audio v2.

    `voice` is a recording whose voice is taken and `voice_text` what it says; `scene` describes the
    recording that is made; `max_new_tokens` frames at most (25 a second).
    """

    voice: str | None = None
    voice_text: str = ""
    scene: str | None = None
    max_new_tokens: int | None = None


@speech_family(
    "higgs_audio_v2", "HiggsAudioV2ForConditionalGeneration", "processor", reader="AutoProcessor"
)
class HiggsVoice(GeneratingTalker):
    """A `HiggsAudioV2ForConditionalGeneration` as a speaker, frame by frame."""

    name, Options, by_sentence = "Higgs Audio v2", HiggsOptions, False
    settings = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens")

    def __init__(self, model: Any, processor: Any, **options: Any) -> None:
        super().__init__(model, processor, **options)
        self.config = model.config
        tokenizer = processor.audio_tokenizer.to(self.device).eval()
        self.codec = load_codec(tokenizer)
        self.sample_rate = self.codec.sample_rate

    def _say(self, texts: list[str], how: HiggsOptions) -> list[Tensor]:
        rows = self._generate(self._inputs(texts, how), how)
        return [pcm.reshape(-1) for pcm in self.processor.batch_decode(rows)]

    def _stream(self, text: str, how: HiggsOptions, random: GeneratorState) -> Iterator[Sound]:
        with self._refusing():
            inputs = self._inputs([text], how)
            prompt = inputs["audio_input_ids"].shape[1] if "audio_input_ids" in inputs else 0
            delay, mouth, count = DelayedRows(self.config), self.codec.decoder.start(1), 0
            for kind, value in self._steps(inputs, how, random):
                rows = value[:, prompt + count :] if kind == "end" else value[:, -1:]
                count += rows.shape[1]
                if len(codes := delay.add(rows[0])):
                    mouth, pcm = self.codec.decoder.step(mouth, codes.T[None])
                    yield self._frames(pcm[0], codes)
            yield self._sound(self.codec.decoder.finish(mouth)[0], "")

    def _frames(self, pcm: Tensor, codes: Tensor) -> Sound:
        sound = self._sound(pcm, "", codes.T.cpu())
        return replace(sound, passes=len(codes), tokens=codes.numel())

    def _hooks(self, steps: Steps) -> Sequence[Any]:
        calls = 0

        def heard(named: dict[str, Any]) -> None:
            nonlocal calls
            calls += 1
            if calls > 1:  # the first one reads the prompt
                steps.tell(named["audio_input_ids"].clone())

        return [named_told(self.model, steps, heard)]

    def _inputs(self, texts: list[str], how: HiggsOptions) -> Any:
        before = [_turn("system", TASK)]
        if how.scene is not None:
            before.append(_turn("scene", how.scene))
        sound = self._recording(how.voice, len(texts))
        if sound:
            before.append(_turn("user", how.voice_text))
            before.append({"role": "assistant", "content": [{"type": "audio"}]})
        prompts = [
            self.processor.apply_chat_template(
                [*before, _turn("user", text)], add_generation_prompt=True, tokenize=False
            )
            for text in texts
        ]
        inputs = self.processor(text=prompts, **sound, padding=True, return_tensors="pt")
        return inputs.to(self.device)


class DelayedRows:
    """Rows of codes in which each book is a frame behind the one before, made frames again."""

    def __init__(self, config: Any) -> None:
        self.begin, self.end = int(config.audio_stream_bos_id), int(config.audio_stream_eos_id)
        self.rows: list[Tensor] = []
        self.over = False

    def add(self, rows: Tensor) -> Tensor:
        """Return the frames `[t, Q]` that rows `[n, Q]` complete."""
        books, frames = rows.shape[1], []
        for row in rows:
            if bool((row == self.begin).all()):  # a voice before it does not belong to the text
                self.rows = []
                continue
            self.over = self.over or bool((row == self.end).all())
            if self.over:
                break
            self.rows = [*self.rows, row][-books:]
            if len(self.rows) == books:
                frames.append(torch.stack([self.rows[at][at] for at in range(books)]))
        found = torch.stack(frames) if frames else rows.new_zeros(0, books)
        return found.clamp(0, self.begin - 1)


def _turn(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}
