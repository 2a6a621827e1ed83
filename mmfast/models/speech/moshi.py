"""Moshi (arXiv 2410.00037) step by step: a frame of the user's codes in, text and codes out.

The stock `MoshiForConditionalGeneration.generate` wants all of the user's audio beforehand, runs
a nested `generate` per frame and keeps its state on the model. Here the state is a value, one
per batch of streams; the weights are the stock model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.core.speech import Codec, Sound, Turn
from mmfast.decoding.codebooks import BlockPlan, CodeChoice, Drafter, FrameDecoder, pick
from mmfast.decoding.sampling import Sampling
from mmfast.frontends.audio.reader import load_audio
from mmfast.models.decoder.stream import StreamDecoder
from mmfast.models.loading import load_codec
from mmfast.models.speech.depth_weights import moshi_depth
from mmfast.ops.codebooks import DelayRing, DelayState
from mmfast.ops.stream_cache import StreamKV, merge


@dataclass(frozen=True, eq=False)
class MoshiState:
    """Where B conversations stand.

    Attributes:
        kv: Of the temporal transformer.
        user: The user's last codes, on their way to the step they belong to.
        own: Moshi's last texts and codes, on their way to the frame they belong to.
        text: `[B]` the text token written last.
        codes: `[B, K]` the codes written last.
    """

    kv: StreamKV
    user: DelayState
    own: DelayState
    text: Tensor
    codes: Tensor


@dataclass(frozen=True, eq=False)
class MoshiFrame:
    """One frame of Moshi's side.

    Attributes:
        text: `[B]` its text token.
        codes: `[B, K]` its audio codes, all of the same moment.
        whole: `[B]` bool: the stream has run long enough for a frame.
    """

    text: Tensor
    codes: Tensor
    whole: Tensor


class MoshiSteps:
    """Steps of `MoshiForConditionalGeneration`.

    Args:
        model: The stock model.
        text: How text tokens are chosen (Moshi's own setting is temperature 0.7, top-k 25).
        audio: How codes are chosen (temperature 0.8, top-k 250).
        drafter: Drafts the codes of a frame, as `decoding.codebooks.copy_frame`; None runs the
            depth transformer code by code.
        plan: How many codes a depth pass takes.
        delays: Steps that each codebook lags; None for 0, 1, 1, ….
        window: Frames that it looks back; None for the configuration's (3000, four minutes).

    Raises:
        ModelError: Not a Moshi.
    """

    def __init__(
        self,
        model: Any,
        *,
        text: CodeChoice | None = None,
        audio: CodeChoice | None = None,
        drafter: Drafter | None = None,
        plan: BlockPlan | None = None,
        delays: tuple[int, ...] | None = None,
        window: int | None = None,
    ) -> None:
        config = model.config
        if config.model_type != "moshi" or not hasattr(model, "depth_decoder"):
            raise ModelError(
                f"{type(model).__name__} is no Moshi that speaks; "
                "load a checkpoint with MoshiForConditionalGeneration"
            )
        self.model, self.books = model, int(config.num_codebooks)
        self.text, self.audio = text or CodeChoice(), audio or CodeChoice()
        self.frames = FrameDecoder(moshi_depth(model.depth_decoder), drafter, plan)
        self.decoder = StreamDecoder(model.decoder.model, window or config.sliding_window)
        # Before the first frame stand tokens of their own, one behind the last real one.
        self.no_text, self.no_code = int(config.vocab_size), int(config.audio_vocab_size)
        lags = delays or (0, *[1] * (self.books - 1))
        self.user_ring = DelayRing(lags, self.no_code)
        self.own_ring = DelayRing((0, *lags), self.no_code)
        self.lags = torch.tensor(lags, device=model.device)

    @torch.no_grad()
    def start(self, batch: int = 1) -> MoshiState:
        """The state before the user's first frame; runs one step."""
        device = self.model.device
        state = MoshiState(
            self.decoder.start(batch),
            self.user_ring.start(batch, device),
            self.own_ring.start(batch, device),
            torch.full((batch,), self.no_text, device=device),
            torch.full((batch, self.books), self.no_code, device=device),
        )
        return self._write(state, state.codes, state.codes)[0]

    @torch.no_grad()
    def step(self, state: MoshiState, user: Tensor) -> tuple[MoshiState, MoshiFrame]:
        """Hear one frame, say one frame.

        Args:
            state: Of the step before; it stays as it is.
            user: `[B, K]` codes of the user's newest frame.

        Returns:
            The next state, and Moshi's frame of the same moment.
        """
        early = state.user.seen[:, None] < self.lags  # [B, K] a lagging book has nothing yet
        ring, heard = self.user_ring.spread(state.user, user)
        said = state.codes.masked_fill(early, self.no_code)
        state, own = self._write(replace(state, user=ring), said, heard)
        return state, own

    def reset(self, state: MoshiState, rows: Tensor) -> MoshiState:
        """The state with some conversations (`[B]` bool) started anew."""
        fresh = self.start(len(rows))
        kv = merge(state.kv, fresh.kv, rows)
        return MoshiState(
            kv,
            _choose(rows, fresh.user, state.user),
            _choose(rows, fresh.own, state.own),
            torch.where(rows, fresh.text, state.text),
            torch.where(rows[:, None], fresh.codes, state.codes),
        )

    def _write(
        self, state: MoshiState, said: Tensor, heard: Tensor
    ) -> tuple[MoshiState, MoshiFrame]:
        """Read what was said and heard `[B, K]`, write the next text token and codes."""
        both = torch.cat([said, heard], dim=1)  # [B, 2 K]
        embeds = self.model.decoder.model.embed_tokens(state.text)
        embeds = embeds + sum(
            table(both[:, book]) for book, table in enumerate(self.model.embed_tokens)
        )
        kv, hidden = self.decoder.step(state.kv, embeds[:, None])
        hidden = hidden[:, -1]
        text = pick(self.model.decoder.lm_head(hidden), self.text)
        codes = self.frames.frame(hidden, text, _inside(state.codes, self.no_code), self.audio)
        own, out, whole = self.own_ring.gather(state.own, torch.cat([text[:, None], codes], dim=1))
        state = MoshiState(kv, state.user, own, text, codes)
        return state, MoshiFrame(out[:, 0], out[:, 1:], whole)


def _inside(codes: Tensor, size: int) -> Tensor:
    return codes.clamp(max=size - 1)  # a draft must be a code


def _choose(rows: Tensor, new: DelayState, old: DelayState) -> DelayState:
    ring = torch.where(rows[:, None, None], new.ring, old.ring)
    return DelayState(ring, torch.where(rows, new.seen, old.seen))


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
class UserSound:
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

    def step(self, state: TalkState, pcm: Tensor) -> tuple[TalkState, UserSound]:
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
