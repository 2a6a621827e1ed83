"""What enters the language model next: the embedded tokens of one frame or of some text."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive tokens of one conversation.

    A piece starts where the one before it says (`advance` behind that one's start), or, where it
    is `fresh`, on every axis one behind the highest position so far. A `level` piece starts on
    every axis where the lowest axis of that start is: text after a video of the Qwen2 families
    counts on from the rows and columns of the frames, not from their times, which run ahead.

    Attributes:
        embeds: `[n, D]` input of the language model.
        relative: `[A, n]` int64 positions from the start of the piece; A is 1, or 3 under M-RoPE.
        advance: `[A]` int64 from the start of this piece to the start of the next one.
        kind: `text` or `frame`.
        fresh: See above.
        level: See above; `relative` then holds how far the last frame's rows or columns reach.
        time: Seconds of the frame on the stream's clock; None for text.
        visual: `[n]` bool, which tokens are visual; None for text.
        planes: DeepStack features `[visual tokens, D]`, one per plane.
        ids: `[n]` token ids, for repetition rules and transcripts.
    """

    embeds: Tensor
    relative: Tensor
    advance: Tensor
    kind: str
    fresh: bool
    time: float | None = None
    visual: Tensor | None = None
    planes: tuple[Tensor, ...] = ()
    ids: Tensor | None = None
    level: bool = False
