"""A conversation with Moshi: sound in and sound out at the same time, with the words it thinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.speech import Codec, Sound, Turn
from mmfast.decoding.codebook_choice import CodeChoice
from mmfast.decoding.sampling import Sampling
from mmfast.frontends.audio import load_audio
from mmfast.models.codec_loading import load_codec
from mmfast.models.moshi import MoshiState, MoshiSteps

# Moshi's own settings (arXiv 2410.00037): text livelier than greedy, codes close to the model.
TEXT = Sampling(temperature=0.7, top_k=25)
AUDIO = Sampling(temperature=0.8, top_k=250)


@dataclass(frozen=True, eq=False)
class TalkState:
    """Where B conversations stand; a value.

    Attributes:
        steps: Of the model.
        ear: Of the codec's encoder.
        mouth: Of the codec's decoder.
    """

    steps: MoshiState
    ear: Any
    mouth: Any


@dataclass(frozen=True, eq=False)
class Heard:
    """What a piece of the user's sound brought.

    Attributes:
        pcm: `[B, n]` Moshi's sound of the same time.
        text: `[B, t]` its text tokens, one per frame.
        codes: `[B, K, t]` its codes.
    """

    pcm: Tensor
    text: Tensor
    codes: Tensor


class MoshiVoice:
    """Moshi as a partner that hears while it speaks (`core.speech.Chatter`).

    Args:
        model: `MoshiForConditionalGeneration`.
        codec: Its Mimi; None takes the one inside the model.
        words: Text token ids to text (`tokenizer.decode`); None gives no text.
        silent: Text tokens that stand for no word: end of padding and padding.
        text: How text is chosen.
        audio: How codes are chosen.
        options: Of `models.moshi.MoshiSteps`: `drafter`, `plan`, `window`, `delays`.

    Raises:
        ModelError: The model is no Moshi, or the codec has fewer codebooks.
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
        **options: Any,
    ) -> None:
        self.steps = MoshiSteps(model, text=CodeChoice(text), audio=CodeChoice(audio), **options)
        books = self.steps.books
        self.codec = codec or load_codec(model.audio_encoder, codebooks=books)
        if self.codec.codebooks != books or self.codec.size != self.steps.no_code:
            raise ModelError(
                f"a codec of {self.codec.codebooks} x {self.codec.size} codes does not fit this "
                f"Moshi; load one of {books} x {self.steps.no_code}"
            )
        self.words, self.silent = words, frozenset(silent)
        self.sample_rate = self.codec.sample_rate

    def start(self, batch: int = 1) -> TalkState:
        """The state of `batch` conversations before any sound."""
        codec = self.codec
        ear, mouth = codec.encoder.start(batch), codec.decoder.start(batch)
        return TalkState(self.steps.start(batch), ear, mouth)

    def step(self, state: TalkState, pcm: Tensor) -> tuple[TalkState, Heard]:
        """Hear a piece of any length, `[B, n]` at the codec's rate; say as much.

        Returns:
            The next state, and what was said: whole frames, so it lags by less than one.
        """
        ear, user = self.codec.encoder.step(state.ear, pcm)
        steps, texts, codes = state.steps, [], []
        for at in range(user.shape[2]):
            steps, frame = self.steps.step(steps, user[:, :, at])
            codes.append(frame.codes.where(frame.whole[:, None], 0))
            texts.append(frame.text)
        if not codes:
            none = user.new_zeros(len(user), 0)
            return TalkState(steps, ear, state.mouth), Heard(none.float(), none, user)
        said = torch.stack(codes, dim=2)
        mouth, sound = self.codec.decoder.step(state.mouth, said)
        heard = Heard(sound, torch.stack(texts, dim=1), said)
        return TalkState(steps, ear, mouth), heard

    def reset(self, state: TalkState, rows: Tensor) -> TalkState:
        """The state with some conversations (`[B]` bool) started anew."""
        ear = self.codec.encoder.reset(state.ear, rows)
        mouth = self.codec.decoder.reset(state.mouth, rows)
        return TalkState(self.steps.reset(state.steps, rows), ear, mouth)

    def run(self, chunks: Iterable[Tensor]) -> Iterator[Sound]:
        """One conversation: pieces `[n]` of the user's sound in, Moshi's sound out, for ever."""
        state, said = self.start(), _Words(self.words, self.silent)
        for chunk in chunks:
            state, heard = self.step(state, chunk[None])
            if heard.codes.shape[2]:
                yield self._sound(heard, said)

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
        """Moshi's sound from the end of what was said on, while the user is silent.

        Args:
            pcm: `[n]` what was said.
            rate: Its samples per second.
            history: Moshi reads no text: a conversation goes on with `start` and `step`, which
                remember it.
            seconds: The longest answer.
            quiet: Over when it has said words and then none for so long.
            **others: There are none; what else is given is named in the error.

        Raises:
            SpecError: An option that Moshi does not have, such as `voice` or `mode`.
        """
        del history
        for name in others:
            raise SpecError(unknown("option of Moshi", name, ("seconds", "quiet")))
        return self._reply(pcm, rate, seconds, quiet)

    def _reply(self, pcm: Tensor, rate: int, seconds: float, quiet: float) -> Iterator[Sound]:
        state, said = self.start(), _Words(self.words, self.silent)
        user = load_audio((pcm, rate), self.sample_rate)
        hop = self.codec.hop
        user = torch.nn.functional.pad(user, (0, -len(user) % hop))
        state, _ = self.step(state, user[None])
        blank, still, spoken = user.new_zeros(1, hop), 0.0, False
        for _ in range(round(seconds * self.codec.frame_rate)):
            state, heard = self.step(state, blank)
            word = int(heard.text[0, -1]) not in self.silent
            spoken, still = spoken or word, 0.0 if word else still + 1 / self.codec.frame_rate
            yield self._sound(heard, said)
            if spoken and still >= quiet:
                return

    def _sound(self, heard: Heard, said: _Words) -> Sound:
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
        """What the next tokens add."""
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
