"""CSM (Sesame's conversational speech model) step by step: a prompt in, frame after frame out.

The stock `CsmForConditionalGeneration.generate` runs a nested `generate` of 31 calls per frame and
hands the sound out when all is done. Here a step gives the codes of one frame, the state is a
value, and the 31 codes are drafted at once where a drafter is given. No paper of its own: the
architecture is that of Moshi's depth transformer (arXiv 2410.00037) behind a Llama.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.kv import KVBlock
from mmfast.core.speech import Codec, Sound
from mmfast.decoding.codebooks import BlockPlan, CodeChoice, Drafter, FrameDecoder, pick
from mmfast.decoding.sampling import Sampling
from mmfast.models.decoder.backbone import StreamDecoder
from mmfast.models.loading import load_codec, speech_family
from mmfast.models.speech.depth_weights import csm_depth
from mmfast.models.speech.talkers.base import sentences


@dataclass(frozen=True, eq=False)
class CsmState:
    """State of B streams.

    `hidden` `[B, D]` is the backbone's last hidden state; `codes` `[B, Q]` the frame it has not
    read yet, None behind a prompt; `before` `[B, Q]` the last frame, for drafters that copy it;
    `ended` is `[B]` bool.
    """

    kv: KVBlock
    hidden: Tensor
    codes: Tensor | None
    before: Tensor
    ended: Tensor


@dataclass(frozen=True)
class SpeechContext:
    """Something said before, as context: it fixes the voice.

    Text `ids` are `[T]`; `codes` `[Q, t]` are None for the text that is to be said.
    """

    ids: Tensor
    codes: Tensor | None = None


class CsmSteps:
    """Steps of `CsmForConditionalGeneration`, else ModelError.

    Codes are chosen by `choice` (Sesame's own setting is temperature 0.9, top-k 50). `drafter`
    drafts the codes 1.. of a frame, `plan` says how many of them a depth pass takes; None runs the
    depth transformer code by code. `window` is positions that it looks back; None for all.
    """

    def __init__(
        self,
        model: Any,
        *,
        choice: CodeChoice | None = None,
        drafter: Drafter | None = None,
        plan: BlockPlan | None = None,
        window: int | None = None,
    ) -> None:
        config = model.config
        if config.model_type != "csm" or not hasattr(model, "depth_decoder"):
            raise ModelError(
                f"{type(model).__name__} is no CSM; "
                "load a checkpoint with CsmForConditionalGeneration"
            )
        self.model, self.books = model, int(config.num_codebooks)
        self.choice = choice or CodeChoice(first=1)
        self.frames = FrameDecoder(csm_depth(model.depth_decoder), drafter, plan)
        self.decoder = StreamDecoder(model.backbone_model, window)
        self.end = int(config.codebook_eos_token_id)

    def embed(self, turns: Sequence[SpeechContext]) -> Tensor:
        """A conversation as the backbone reads it, `[T, D]`: text, frames and an end per turn."""
        device, parts = self.model.device, []
        for turn in turns:
            parts.append(self.model.embed_text_tokens(turn.ids.to(device)))
            if turn.codes is not None:
                last = turn.codes.new_full((self.books, 1), self.end)
                codes = torch.cat([turn.codes, last], dim=1).to(device)
                parts.append(self.model.backbone_model.embed_tokens(codes.T[None])[0])
        return torch.cat(parts)

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[SpeechContext]]) -> CsmState:
        """Read a prompt per stream: what was said before and, last, the text that is to be said."""
        rows = [self.embed(turns) for turns in prompts]
        longest = max(len(row) for row in rows)
        embeds = rows[0].new_zeros(len(rows), longest, rows[0].shape[1])
        real = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        for at, row in enumerate(rows):
            embeds[at, longest - len(row) :] = row
            real[at, longest - len(row) :] = True
        kv, hidden = self.decoder.step(self.decoder.start(len(rows)), embeds, real)
        zeros = torch.zeros(len(rows), self.books, dtype=torch.long, device=embeds.device)
        return CsmState(kv, hidden[:, -1], None, zeros, zeros[:, 0].bool())

    @torch.no_grad()
    def step(self, state: CsmState) -> tuple[CsmState, Tensor]:
        """Say one frame: the next state, and codes `[B, Q]`.

        `ended` of the state tells where speech is over; codes of those streams are not to be heard.
        """
        kv, hidden = state.kv, state.hidden
        if state.codes is not None:
            embeds = self.model.backbone_model.embed_tokens(state.codes[:, None])
            kv, out = self.decoder.step(kv, embeds)
            hidden = out[:, -1]
        first = pick(self.model.lm_head(hidden), self.choice, -1)
        rest = self.frames.frame(hidden, first, state.before[:, 1:], self.choice)
        codes = torch.cat([first[:, None], rest], dim=1)
        ended = state.ended | (codes == self.end).all(1)
        return CsmState(kv, hidden, codes, codes, ended), codes


AUDIO = Sampling(temperature=0.9, top_k=50)  # Sesame's own setting


@speech_family("csm", "CsmForConditionalGeneration", "tokenizer")
class CsmVoice:
    """Sesame's CSM as a `core.speech.Speaker`.

    `codec` None takes the Mimi inside the model; `options` are `drafter`, `plan`, `window` of
    `CsmSteps`. ModelError: the model is no CSM, or the codec has other codebooks.
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
        self.steps = CsmSteps(model, choice=CodeChoice(audio, first=1), **options)
        self.codec = codec or load_codec(model.codec_model, codebooks=self.steps.books)
        if self.codec.codebooks != self.steps.books:
            raise ModelError(
                f"a codec of {self.codec.codebooks} codebooks does not fit this CSM; "
                f"load one of {self.steps.books}"
            )
        self.tokenizer = tokenizer
        self.sample_rate = self.codec.sample_rate
        self.room = int(model.config.max_position_embeddings)

    def said(self, text: str, pcm: Tensor | None = None, voice: str = "0") -> SpeechContext:
        """A turn of the conversation; with its sound `[n]` it fixes the voice."""
        ids = self.tokenizer.encode(f"[{voice}]{text}", add_special_tokens=False)
        ends = (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        ids = [
            *(i for i in ends[:1] if i is not None),
            *ids,
            *(i for i in ends[1:] if i is not None),
        ]
        codes = None if pcm is None else self.codec.encode(pcm[None])[0]
        return SpeechContext(torch.tensor(ids), codes)

    def speak(
        self,
        text: str | Iterable[str],
        *,
        voice: str = "0",
        context: Sequence[SpeechContext] = (),
        seconds: float = 20.0,
        **others: Any,
    ) -> Iterator[Sound]:
        """Say text, sentence by sentence; each hears the ones before it.

        Text may come in pieces: a sentence is spoken when it is complete, and yields a frame at a
        time, the first with its text. `voice` is the number of the speaker; of `context` the oldest
        is dropped when there is no room left; `seconds` bounds a sentence. SpecError names an
        option that CSM does not have, such as `rate` or `mode`.
        """
        for name in others:
            raise SpecError(unknown("option of CSM", name, ("voice", "context", "seconds")))
        return self._say(text, voice, list(context), seconds)

    def _say(
        self, text: str | Iterable[str], voice: str, turns: list[SpeechContext], seconds: float
    ) -> Iterator[Sound]:
        frames = round(seconds * self.codec.frame_rate)
        mouth = self.codec.decoder.start(1)
        for sentence in sentences(text):
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

    def start(self, prompts: Sequence[Sequence[SpeechContext]]) -> CsmState:
        """Several streams at once: see `CsmSteps.start`, and go on with `steps.step`."""
        return self.steps.start(prompts)

    def _codes(self, codes: Tensor) -> Tensor:
        return codes.clamp(max=self.codec.size - 1)  # padding is no sound

    def _fit(self, turns: list[SpeechContext], frames: int) -> list[SpeechContext]:
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
