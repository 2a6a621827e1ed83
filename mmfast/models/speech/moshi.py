"""Moshi (arXiv 2410.00037) as a voice: a partner that hears while it speaks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.speech import Codec, Sound, Turn
from mmfast.decoding.codebooks import CodeChoice, Drafter
from mmfast.decoding.sampling import Sampling
from mmfast.frontends.audio.reader import load_audio
from mmfast.models.loading import load_codec, speech_family
from mmfast.models.speech.moshi_graphs import GraphRecorder, MoshiFrames, graphs_for
from mmfast.models.speech.moshi_steps import MoshiState, MoshiSteps, UserSound

# Moshi's own settings (arXiv 2410.00037): text livelier than greedy, codes close to the model.
TEXT = Sampling(temperature=0.7, top_k=25)
AUDIO = Sampling(temperature=0.8, top_k=250)


@dataclass(frozen=True, eq=False)
class TalkState:
    """State of B conversations: of the model, the codec's encoder and its decoder; a value."""

    steps: MoshiState
    ear: Any
    mouth: Any


@speech_family("moshi", "MoshiForConditionalGeneration", "words", part="decode")
class MoshiVoice:
    """Moshi as a partner that hears while it speaks (`core.speech.Chatter`).

    `codec` None takes the Mimi inside the model. `words` turns text token ids into text
    (`tokenizer.decode`), None gives no text; `silent` tokens stand for no word: end of padding and
    padding. `drafter` and `options` are those of `MoshiSteps`.

    `graphs` records the frames of `run` and `reply` (`MoshiFrames`), which one conversation at a
    time replays; others meanwhile go step by step. None: CUDA graphs on a CUDA device where there
    is no drafter, else every conversation goes step by step. ModelError: the model is no Moshi, or
    the codec has fewer codebooks.
    """

    def __init__(
        self,
        model: Any,
        codec: Codec | None = None,
        *,
        words: Callable[[list[int]], str] | None = None,
        silent: Sequence[int] = (0, 3),
        text: Sampling = TEXT,
        audio: Sampling = AUDIO,
        graphs: GraphRecorder | None = None,
        drafter: Drafter | None = None,
        **options: Any,
    ) -> None:
        text_choice, codes = CodeChoice(text), CodeChoice(audio)
        self.steps = MoshiSteps(model, text=text_choice, audio=codes, drafter=drafter, **options)
        books = self.steps.books
        self.codec = codec or load_codec(model.audio_encoder, codebooks=books)
        if self.codec.codebooks != books or self.codec.size != self.steps.no_code:
            raise ModelError(
                f"a codec of {self.codec.codebooks} x {self.codec.size} codes does not fit this "
                f"Moshi; load one of {books} x {self.steps.no_code}"
            )
        self.words, self.silent = words, frozenset(silent)
        self.sample_rate = self.codec.sample_rate
        self.graphs = graphs
        if graphs is None and drafter is None and device_kind(model) == "cuda":
            self.graphs = graphs_for(model.device)
        self._frames: MoshiFrames | None = None
        self._replaying = threading.Lock()

    def start(self, batch: int = 1) -> TalkState:
        """The state of `batch` conversations before any sound."""
        codec = self.codec
        ear, mouth = codec.encoder.start(batch), codec.decoder.start(batch)
        return TalkState(self.steps.start(batch), ear, mouth)

    def step(self, state: TalkState, pcm: Tensor) -> tuple[TalkState, UserSound]:
        """Hear a piece `[B, n]` at the codec's rate; say as much, in whole frames."""
        ear, user = self.codec.encoder.step(state.ear, pcm)
        steps, texts, codes = state.steps, [], []
        for at in range(user.shape[2]):
            steps, frame = self.steps.step(steps, user[:, :, at])
            codes.append(frame.codes.where(frame.whole[:, None], 0))
            texts.append(frame.text)
        if not codes:
            none = user.new_zeros(len(user), 0)
            return TalkState(steps, ear, state.mouth), UserSound(none.float(), none, user)
        said = torch.stack(codes, dim=2)
        mouth, sound = self.codec.decoder.step(state.mouth, said)
        heard = UserSound(sound, torch.stack(texts, dim=1), said)
        return TalkState(steps, ear, mouth), heard

    def reset(self, state: TalkState, rows: Tensor) -> TalkState:
        """The state with some conversations (`[B]` bool) started anew."""
        ear = self.codec.encoder.reset(state.ear, rows)
        mouth = self.codec.decoder.reset(state.mouth, rows)
        return TalkState(self.steps.reset(state.steps, rows), ear, mouth)

    def run(self, chunks: Iterable[Tensor]) -> Iterator[Sound]:
        """One conversation: pieces `[n]` of the user's sound in, Moshi's sound out, without end."""
        said = _Words(self.words, self.silent)
        with self._conversation() as hear:
            for chunk in chunks:
                heard = hear(chunk)
                if heard.codes.shape[2]:
                    yield self._sound(heard, said)

    @contextmanager
    def _conversation(self) -> Iterator[Callable[[Tensor], UserSound]]:
        """Return a function of the next piece `[n]` of the user's sound."""
        if self.graphs is None or not self._replaying.acquire(blocking=False):
            state = self.start()

            def hear(pcm: Tensor) -> UserSound:
                nonlocal state
                state, heard = self.step(state, pcm[None])
                return heard

            yield hear
            return
        try:
            if self._frames is None:
                self._frames = MoshiFrames(self, 1, self.graphs)
            yield self._replayed(self._frames)
        finally:
            self._replaying.release()

    def _replayed(self, frames: MoshiFrames) -> Callable[[Tensor], UserSound]:
        frames.reset()
        held = torch.zeros(0)

        def hear(pcm: Tensor) -> UserSound:
            nonlocal held
            held = torch.cat([held, pcm.detach().float().cpu()])
            whole = len(held) // frames.hop * frames.hop
            parts = held[:whole].split(frames.hop) if whole else ()
            held = held[whole:].clone()
            codes = torch.zeros(1, self.steps.books, 0, dtype=torch.long)
            found = [UserSound(torch.zeros(1, 0), codes[:, 0], codes)]
            count = self.steps.frames.count
            for part in parts:
                said = frames.frame(part[None])  # in buffers: the next frame overwrites them
                kept = (each.cpu().clone() for each in (said.pcm, said.text, said.codes))
                found.append(UserSound(*kept))
                frames.check()
                count.frames += 1
                count.rounds += self.steps.books
                count.tokens += self.steps.books
            pieces = zip(*((each.pcm, each.text, each.codes) for each in found), strict=True)
            return UserSound(*(torch.cat(each, dim=-1) for each in pieces))

        return hear

    def reply(
        self,
        pcm: Tensor,
        rate: int = 16000,
        history: Sequence[Turn] = (),
        *,
        seconds: float = 30.0,
        quiet: float = 2.0,
        **others: Any,
    ) -> Iterator[Sound]:
        """Answer speech `[n]`: Moshi's sound while the user is silent, `seconds` at most.

        It is over when Moshi has said words and then none for `quiet` seconds. `history` is not
        used, as Moshi reads no text: a conversation goes on with `start` and `step`, which remember
        it. SpecError names an option that Moshi does not have, such as `voice` or `mode`.
        """
        del history
        for name in others:
            raise SpecError(unknown("option of Moshi", name, ("seconds", "quiet")))
        return self._reply(pcm, rate, seconds, quiet)

    def _reply(self, pcm: Tensor, rate: int, seconds: float, quiet: float) -> Iterator[Sound]:
        said, hop = _Words(self.words, self.silent), self.codec.hop
        user = load_audio((pcm, rate), self.sample_rate)
        user = torch.nn.functional.pad(user, (0, -len(user) % hop))
        blank, still, spoken = user.new_zeros(hop), 0.0, False
        with self._conversation() as hear:
            hear(user)
            for _ in range(round(seconds * self.codec.frame_rate)):
                heard = hear(blank)
                word = int(heard.text[0, -1]) not in self.silent
                spoken, still = spoken or word, 0.0 if word else still + 1 / self.codec.frame_rate
                yield self._sound(heard, said)
                if spoken and still >= quiet:
                    return

    def _sound(self, heard: UserSound, said: _Words) -> Sound:
        frames = heard.codes.shape[2]
        count = self.steps.frames.count
        return Sound(
            heard.pcm[0].cpu(),
            self.sample_rate,
            said.more(heard.text[0].tolist()),
            heard.codes[0].cpu(),
            passes=frames,
            tokens=heard.codes[0].numel(),
            notes=count.to_dict(),
        )


class _Words:
    """Text of tokens as they come; characters wait until all their bytes are there."""

    def __init__(self, words: Callable[[list[int]], str] | None, silent: frozenset[int]) -> None:
        self.words, self.silent = words, silent
        self.ids: list[int] = []
        self.shown = ""

    def more(self, ids: list[int]) -> str:
        if self.words is None:
            return ""
        self.ids += [i for i in ids if i not in self.silent]
        text = self.words(self.ids)
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self.shown) :]
        self.shown = text
        if len(self.ids) > 64:  # a conversation without end: keep one token of context
            self.ids = self.ids[-1:]
            self.shown = self.words(self.ids)
        return new


def device_kind(model: Any) -> str:
    """Return the kind of a model's device, such as `cuda`."""
    return torch.device(model.device).type
