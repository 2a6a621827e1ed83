"""Codes of the embedded codec to sound, in pieces of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmfast.frontends.codecs.checks import check_codes
from mmfast.frontends.codecs.embedded_features import FRAME, STEPS
from mmfast.frontends.codecs.embedded_network import LOOKAHEAD, VocoderNet
from mmfast.frontends.codecs.embedded_synthesis import SynthesisState, synthesise

_BLOCK = 250  # frames at once: bounded memory however long the codes


@dataclass(frozen=True)
class DecoderState:
    """What coming sound depends on, of `B` streams."""

    tails: tuple[Tensor, ...]  # of the network, [B, past, W] each
    voice: SynthesisState
    waiting: Tensor  # [B] int64, frames until a stream sounds
    skipped: int  # frames of the batch that still give no sound


class EmbeddedDecoder:
    """Codes `[B, Q, t]` to pcm `[B, n]` as a `Stage`; sound comes one frame behind its codes.

    A stream that is reset while others go on is silent for that one frame and then sounds as a
    new one does; what it had not said is dropped.
    """

    lookahead = LOOKAHEAD * FRAME  # samples

    def __init__(self, books: Tensor, net: VocoderNet) -> None:
        self.books = books.double()  # [Q, V, 100]
        self.net = net.double().eval().requires_grad_(False)

    def start(self, batch: int = 1) -> DecoderState:
        """Streams that have said nothing."""
        return DecoderState(
            tuple(self.net.tails(batch)),
            SynthesisState.start(batch, self.books),
            torch.full((batch,), LOOKAHEAD, device=self.books.device),
            LOOKAHEAD,
        )

    def features(self, codes: Tensor) -> Tensor:
        """What codes `[B, Q, T]` stand for: the sum of their entries `[B, T, 100]`."""
        parts = [book[code] for book, code in zip(self.books, codes.unbind(1), strict=False)]
        return torch.stack(parts).sum(0)

    @torch.no_grad()
    def step(self, state: DecoderState, chunk: Tensor) -> tuple[DecoderState, Tensor]:
        """Add codes `[B, Q, t]`; give the sound they make certain `[B, n]`, float32.

        Raises:
            MediaError: Not whole numbers of that shape and range.
        """
        books, size, _ = self.books.shape
        codes = check_codes(chunk, books, size, len(state.waiting)).to(self.books.device)
        parts = []
        for block in codes.split(_BLOCK, 2):
            if block.shape[2]:
                state, sound = self._block(state, self.features(block))
                parts.append(sound)
        empty = self.books.new_zeros(len(chunk), 0)
        return state, torch.cat([empty, *parts], 1).float()

    def _block(self, state: DecoderState, frames: Tensor) -> tuple[DecoderState, Tensor]:
        count = frames.shape[1]
        pitch, points, tails = self.net(frames, list(state.tails))
        there = torch.arange(count, device=frames.device) >= state.waiting[:, None]  # [B, T]
        voice, sound = synthesise(state.voice, pitch, points, there.repeat_interleave(STEPS, 1))
        skip = min(state.skipped, count)
        waiting = (state.waiting - count).clamp(min=0)
        new = DecoderState(tuple(tails), voice, waiting, state.skipped - skip)
        return new, sound[:, skip * FRAME :]

    def finish(self, state: DecoderState) -> Tensor:
        """The sound of the last frame, with silence behind it `[B, 640]`; nothing if none came."""
        codes = torch.zeros(len(state.waiting), len(self.books), LOOKAHEAD, dtype=torch.long)
        return self.step(state, codes)[1]

    def reset(self, state: DecoderState, rows: Tensor) -> DecoderState:
        """Start streams `rows` (`[B]` bool) anew; the others go on."""
        if bool(rows.all()):
            return self.start(len(rows))
        rows = rows.to(self.books.device)
        new, old = self.start(len(rows)), state.voice

        def pick(fresh: Tensor, used: Tensor) -> Tensor:
            return torch.where(rows.view(-1, *[1] * (used.dim() - 1)), fresh, used)

        voice = SynthesisState(
            pick(new.voice.points, old.points),
            pick(new.voice.pitch, old.pitch),
            pick(new.voice.phase, old.phase),
            pick(new.voice.count, old.count),
            pick(new.voice.ringing, old.ringing),
        )
        tails = tuple(pick(a, b) for a, b in zip(new.tails, state.tails, strict=True))
        return replace(state, tails=tails, voice=voice, waiting=pick(new.waiting, state.waiting))
