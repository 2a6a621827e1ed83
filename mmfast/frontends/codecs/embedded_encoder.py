"""Sound to codes of the embedded codec: two residual books, the choice weighed by its rarity.

An entry costs its distance and `bias`, which is larger the rarer the entry was in training
(entropy-constrained vector quantisation, P. Chou, T. Lookabaugh, R. Gray, 1989): codes become
half as surprising to a language model for a hundredth more error.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.frontends.codecs.checks import check_pcm
from mmfast.frontends.codecs.embedded_features import FRAME, PAST, features

_BLOCK = 250  # frames at once: bounded memory however long the sound


def quantise(frames: Tensor, books: Tensor, bias: Tensor) -> Tensor:
    """Residual quantisation: each book codes what the books before left over.

    Args:
        frames: `[..., D]` float64.
        books: Entries `[Q, V, D]`.
        bias: What an entry costs beside its squared distance `[Q, V]`.

    Returns:
        Codes `[..., Q]`, int64.
    """
    codes = []
    for book, price in zip(books.double(), bias.double(), strict=True):
        cost = book.square().sum(-1) + price - 2.0 * frames @ book.mT  # [..., V]
        code = cost.argmin(-1)
        frames = frames - book[code]
        codes.append(code)
    return torch.stack(codes, -1)


@dataclass(frozen=True)
class EncoderState:
    """Samples that coming frames still need: 480 of the past and the frame begun `[B, 480 + r]`."""

    tail: Tensor

    @property
    def pending(self) -> int:
        """Samples of a frame that is not complete."""
        return self.tail.shape[1] - PAST


class EmbeddedEncoder:
    """pcm `[B, n]` to codes `[B, Q, t]` as a `Stage`; a frame is out with its last sample."""

    lookahead = 0

    def __init__(self, books: Tensor, bias: Tensor) -> None:
        self.books, self.bias = books.double(), bias.double()

    def start(self, batch: int = 1) -> EncoderState:
        """Streams that have heard nothing."""
        return EncoderState(self.books.new_zeros(batch, PAST))

    def step(self, state: EncoderState, chunk: Tensor) -> tuple[EncoderState, Tensor]:
        """Add samples `[B, n]`, any number; give the frames they complete `[B, Q, t]`.

        Raises:
            MediaError: Not finite floating-point samples `[B, n]`.
        """
        pcm = check_pcm(chunk, len(state.tail)).to(state.tail)
        heard = torch.cat([state.tail, pcm], 1)
        count = (heard.shape[1] - PAST) // FRAME
        codes = [self._block(heard, at, min(count, at + _BLOCK)) for at in range(0, count, _BLOCK)]
        empty = torch.zeros(len(heard), len(self.books), 0, dtype=torch.long, device=heard.device)
        return EncoderState(heard[:, count * FRAME :].clone()), torch.cat([empty, *codes], 2)

    def _block(self, heard: Tensor, start: int, stop: int) -> Tensor:
        frames = features(heard[:, start * FRAME : stop * FRAME + PAST])
        return quantise(frames, self.books, self.bias).mT  # [B, Q, t]

    def finish(self, state: EncoderState) -> Tensor:
        """The frame begun, filled up with silence: `[B, Q, 1]`, or `[B, Q, 0]`."""
        rest = -state.pending % FRAME
        return self.step(state, state.tail.new_zeros(len(state.tail), rest))[1]

    def reset(self, state: EncoderState, rows: Tensor) -> EncoderState:
        """Start streams `rows` (`[B]` bool) anew; the others go on.

        Samples of a frame that a stream had begun are silence then: rows share frames.
        """
        if bool(rows.all()):
            return self.start(len(state.tail))
        return EncoderState(state.tail.masked_fill(rows.to(state.tail.device)[:, None], 0.0))
