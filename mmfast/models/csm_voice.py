"""CSM as a speaker: text in, sound out frame by frame, in the voice of what was said before."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.speech import Codec, Sound
from mmfast.decoding.codebook_choice import CodeChoice
from mmfast.decoding.sampling import Sampling
from mmfast.models.codec_loading import load_codec
from mmfast.models.csm import CsmState, CsmSteps, Said

AUDIO = Sampling(temperature=0.9, top_k=50)  # Sesame's own setting
_END = re.compile(r"(?<=[.!?…;:])\s+")


class CsmVoice:
    """Sesame's CSM as a `core.speech.Speaker`.

    Args:
        model: `CsmForConditionalGeneration`.
        tokenizer: Its text tokenizer.
        codec: Its Mimi; None takes the one inside the model.
        audio: How codes are chosen.
        options: Of `models.csm.CsmSteps`: `drafter`, `plan`, `window`.

    Raises:
        ModelError: The model is no CSM, or the codec has other codebooks.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        codec: Codec | None = None,
        *,
        audio: Sampling = AUDIO,
        **options: Any,
    ) -> None:
        self.steps = CsmSteps(model, choice=CodeChoice(audio), **options)
        self.codec = codec or load_codec(model.codec_model, codebooks=self.steps.books)
        if self.codec.codebooks != self.steps.books:
            raise ModelError(
                f"a codec of {self.codec.codebooks} codebooks does not fit this CSM; "
                f"load one of {self.steps.books}"
            )
        self.tokenizer = tokenizer
        self.sample_rate = self.codec.sample_rate
        self.room = int(model.config.max_position_embeddings)

    def said(self, text: str, pcm: Tensor | None = None, voice: str = "0") -> Said:
        """A turn of the conversation; with its sound `[n]` it fixes the voice."""
        ids = self.tokenizer.encode(f"[{voice}]{text}", add_special_tokens=False)
        ends = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        ids = [
            *(i for i in ends[:1] if i is not None),
            *ids,
            *(i for i in ends[1:] if i is not None),
        ]
        codes = None if pcm is None else self.codec.encode(pcm[None])[0]
        return Said(torch.tensor(ids), codes)

    def speak(
        self,
        text: str | Iterable[str],
        *,
        voice: str = "0",
        context: Sequence[Said] = (),
        seconds: float = 20.0,
        **others: Any,
    ) -> Iterator[Sound]:
        """Say text, sentence by sentence; each hears the ones before it.

        Args:
            text: Text, or pieces of it as they come: a sentence is spoken when it is complete.
            voice: Number of the speaker.
            context: What was said before; the oldest is dropped when there is no room left.
            seconds: The longest sentence.
            **others: There are none; what else is given is named in the error.

        Yields:
            A frame at a time; the first of a sentence carries its text.

        Raises:
            SpecError: An option that CSM does not have, such as `rate` or `mode`.
        """
        for name in others:
            raise SpecError(unknown("option of CSM", name, ("voice", "context", "seconds")))
        return self._say(text, voice, list(context), seconds)

    def _say(
        self, text: str | Iterable[str], voice: str, turns: list[Said], seconds: float
    ) -> Iterator[Sound]:
        frames = round(seconds * self.codec.frame_rate)
        mouth = self.codec.decoder.start(1)
        for sentence in _sentences(text):
            turns.append(self.said(sentence.strip(), None, voice))
            turns = self._fit(turns, frames)
            state = self.steps.start([turns])
            kept: list[Tensor] = []
            shown = sentence
            while len(kept) < frames:
                state, codes = self.steps.step(state)
                if bool(state.ended[0]):
                    break
                kept.append(codes[0])
                mouth, pcm = self.codec.decoder.step(mouth, self._codes(codes)[:, :, None])
                yield self._sound(pcm, shown, codes)
                shown = ""
            if kept:
                turns[-1] = replace(turns[-1], codes=torch.stack(kept, dim=1))
            else:
                turns.pop()
        tail = self.codec.decoder.finish(mouth)[0]
        if len(tail):
            yield Sound(tail.cpu(), self.sample_rate)

    def start(self, prompts: Sequence[Sequence[Said]]) -> CsmState:
        """Several streams at once: see `CsmSteps.start`, and go on with `steps.step`."""
        return self.steps.start(prompts)

    def _codes(self, codes: Tensor) -> Tensor:
        return codes.clamp(max=self.codec.size - 1)  # padding is no sound

    def _fit(self, turns: list[Said], frames: int) -> list[Said]:
        lengths = [len(t.ids) + (0 if t.codes is None else t.codes.shape[1] + 1) for t in turns]
        while len(turns) > 1 and sum(lengths) + frames > self.room:
            turns, lengths = turns[1:], lengths[1:]
        return turns

    def _sound(self, pcm: Tensor, text: str, codes: Tensor) -> Sound:
        notes = self.steps.frames.count.to_dict()
        return Sound(
            pcm[0].cpu(),
            self.sample_rate,
            text,
            codes[0, :, None].cpu(),
            passes=1,
            tokens=codes.shape[1],
            notes=notes,
        )


def _sentences(text: str | Iterable[str]) -> Iterator[str]:
    """Sentences as soon as they are complete; joined they are the text."""
    rest = ""
    for piece in [text] if isinstance(text, str) else text:
        rest += piece
        while found := _END.search(rest):
            yield rest[: found.end()]
            rest = rest[found.end() :]
    if rest.strip():
        yield rest
