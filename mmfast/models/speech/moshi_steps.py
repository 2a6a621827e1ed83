"""Moshi (arXiv 2410.00037) step by step: a frame of the user's codes in, text and codes out.

The stock `MoshiForConditionalGeneration.generate` wants all of the user's audio beforehand, runs
a nested `generate` per frame and keeps its state on the model. Here the state is a value, one
per batch of streams; the weights are the stock model's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.decoding.codebooks import BlockPlan, CodeChoice, Drafter, FrameDecoder, pick
from mmfast.models.decoder.backbone import StreamDecoder
from mmfast.models.speech.depth_weights import moshi_depth
from mmfast.ops.codebooks import DelayRing, DelayState
from mmfast.ops.stream_cache import merge


@dataclass(frozen=True, eq=False)
class MoshiState:
    """State of B conversations.

    `user` are the user's last codes, on their way to the step they belong to; `own` Moshi's last
    texts and codes, on their way to the frame they belong to; `text` `[B]` and `codes` `[B, K]`
    were written last.
    """

    kv: KVBlock
    user: DelayState
    own: DelayState
    text: Tensor
    codes: Tensor


@dataclass(frozen=True, eq=False)
class MoshiFrame:
    """One frame of Moshi's side: text `[B]`, and audio codes `[B, K]` of the same moment.

    `whole` `[B]` tells where the stream has run long enough for a frame.
    """

    text: Tensor
    codes: Tensor
    whole: Tensor


class MoshiSteps:
    """Steps of `MoshiForConditionalGeneration`, else ModelError.

    `text` and `audio` say how text tokens and codes are chosen (Moshi's own settings are
    temperature 0.7, top-k 25, and 0.8, 250). `drafter` drafts the codes of a frame, as
    `decoding.codebooks.copy_frame`, and `plan` says how many of them a depth pass takes; without it
    the depth transformer runs code by code. `delays` are steps that each codebook lags, None for 0,
    1, 1, …; `window` is frames that it looks back, None for the configuration's (3000, four
    minutes).
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
        """Hear a frame of the user's codes `[B, K]`, say one; the given state stays as it is."""
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
        both = torch.cat([said, heard], dim=1)  # [B, 2 K]
        embeds = self.model.decoder.model.embed_tokens(state.text)
        embeds = embeds + sum(
            table(both[:, book]) for book, table in enumerate(self.model.embed_tokens)
        )
        kv, hidden = self.decoder.step(state.kv, embeds[:, None])
        hidden = hidden[:, -1]
        text = pick(self.model.decoder.lm_head(hidden), self.text)
        draft = state.codes.clamp(max=self.no_code - 1)  # it must be a code
        codes = self.frames.frame(hidden, text, draft, self.audio)
        own, out, whole = self.own_ring.gather(state.own, torch.cat([text[:, None], codes], dim=1))
        state = MoshiState(kv, state.user, own, text, codes)
        return state, MoshiFrame(out[:, 0], out[:, 1:], whole)


def _choose(rows: Tensor, new: DelayState, old: DelayState) -> DelayState:
    ring = torch.where(rows[:, None, None], new.ring, old.ring)
    return DelayState(ring, torch.where(rows, new.seen, old.seen))


@dataclass(frozen=True, eq=False)
class UserSound:
    """Moshi's sound `[B, n]`, text `[B, t]` (a token per frame) and codes `[B, K, t]`.

    They are of the same time as a piece of the user's sound.
    """

    pcm: Tensor
    text: Tensor
    codes: Tensor
