"""Where blocks stand: the positions a stock model would give a prompt made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.streams.piece import Piece

Start = tuple[int, ...]  # one position per axis

TEXT, VISUAL, MARKER = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Live:
    """A block of a stream whose keys stand in the buffers.

    Attributes:
        number: Counts the blocks of the stream from 0.
        kind: `text` or `frame`.
        time: Seconds of the frame on the stream's clock; None for text.
        relative: `[A, n]` int64 on the CPU, positions from its start.
        advance: How far behind its start the next block starts.
        fresh: It starts behind the highest position so far, on all axes.
        level: It starts on all axes at the lowest axis of where it would start.
        highest: Its highest relative position per axis; see `highest`.
        kinds: `[n]` int64 on the CPU: 0 text, 1 visual, 2 markers inside a frame.
        start: Where it stands.
        held: Tokens that layers hold, ascending: () all of them, one tensor `[m]` the same for
            all layers, else one per layer.
        whole: Nothing of it has left; else its first tokens are sinks.
    """

    number: int
    kind: str
    time: float | None
    relative: Tensor
    advance: Start
    fresh: bool
    level: bool
    highest: Start
    kinds: Tensor
    start: Start
    held: tuple[Tensor, ...] = ()
    whole: bool = True

    @property
    def n(self) -> int:
        """Tokens that went into the language model."""
        return self.relative.shape[-1]

    @property
    def size(self) -> int:
        """Tokens that count against the budget: those of the layer that holds most."""
        return max((len(held) for held in self.held), default=self.n)

    @property
    def even(self) -> bool:
        """Whether all layers hold the same tokens of it."""
        return len(self.held) < 2

    def tokens(self, layer: int) -> Tensor | None:
        """The tokens `[m]` that a layer holds, None for all."""
        if not self.held:
            return None
        return self.held[0] if self.even else self.held[layer]

    def size_at(self, layer: int) -> int:
        """How many tokens a layer holds."""
        held = self.tokens(layer)
        return self.n if held is None else len(held)

    def positions(self, layer: int, start: Start | None = None) -> Tensor:
        """Positions `[A, m]` of what a layer holds, where it stands or from another start."""
        held = self.tokens(layer)
        relative = self.relative if held is None else self.relative.index_select(-1, held)
        return relative + torch.tensor(self.start if start is None else start)[:, None]

    def counted(self) -> Tensor:
        """Kinds `[size]` of the tokens that count against the budget."""
        longest = max(self.held, key=len) if self.held else None
        return self.kinds if longest is None else self.kinds.index_select(0, longest)

    @cached_property
    def pattern(self) -> bytes:
        """Its counted kinds, to tell whether blocks are like others."""
        return self.counted().to(torch.uint8).numpy().tobytes()

    def top(self, start: Start) -> int:
        """Its highest position on any axis, standing at `start`."""
        return max(high + axis for high, axis in zip(self.highest, start, strict=True))


@dataclass
class Cursor:
    """Walks along blocks and says where each of them starts.

    Attributes:
        next: Where the next block starts, unless it is fresh.
        top: The highest position so far; -1 before the first.
    """

    next: Start
    top: int = -1

    @classmethod
    def behind(cls, blocks: Sequence[Live], axes: int) -> Cursor:
        """At the end of blocks, where they stand."""
        if not blocks:
            return cls((0,) * axes)
        last = blocks[-1]
        after = tuple(a + b for a, b in zip(last.start, last.advance, strict=True))
        return cls(after, max(block.top(block.start) for block in blocks))

    def start(self, block: Live | Piece) -> Start:
        """Where a block starts here."""
        start = (self.top + 1,) * len(self.next) if block.fresh else self.next
        return (min(start),) * len(start) if block.level else start

    def place(self, block: Live) -> Start:
        """Start of a block, and on to its end."""
        start = self.start(block)
        self.next = tuple(a + b for a, b in zip(start, block.advance, strict=True))
        self.top = max(self.top, block.top(start))
        return start


def walk(blocks: Sequence[Live], axes: int) -> list[Start]:
    """Starts of blocks in a prompt made of them alone."""
    cursor = Cursor((0,) * axes)
    return [cursor.place(block) for block in blocks]


def live(piece: Piece, number: int, start: Start) -> Live:
    """The block that a piece becomes.

    Raises:
        MmfastError: Its shapes contradict each other, or it is empty.
    """
    n, axes = piece.embeds.shape[0], len(start)
    relative = piece.relative.to("cpu", torch.int64)
    if n < 1 or relative.shape != (axes, n) or len(piece.advance) != axes:
        raise MmfastError(
            f"a piece of {n} tokens has relative {list(relative.shape)} and advance "
            f"{list(piece.advance.shape)}; this model needs n >= 1, [{axes}, n] and [{axes}]"
        )
    kinds = torch.full((n,), TEXT)
    if piece.kind == "frame":
        visual = piece.visual
        kinds = torch.where(visual.cpu(), VISUAL, MARKER) if visual is not None else kinds + VISUAL
    advance = tuple(int(each) for each in piece.advance)
    return Live(
        number,
        piece.kind,
        piece.time,
        relative,
        advance,
        piece.fresh,
        piece.level,
        highest(relative, advance),
        kinds,
        start,
    )


def highest(relative: Tensor, advance: Start) -> Start:
    """Highest relative position per axis of tokens `[A, n]`.

    Of a reduced frame it is that of the whole one, where its advance tells: it does where all
    axes go on behind the highest token.
    """
    found = relative.amax(-1).tolist()
    if len(set(advance)) == 1:
        found = [max(each, advance[0] - 1) for each in found]
    return tuple(found)


def to_tree(block: Live) -> dict[str, Any]:
    """A block as a tree of plain values, for saving."""
    return {name: getattr(block, name) for name in Live.__dataclass_fields__}


def from_tree(tree: dict[str, Any]) -> Live:
    """The block that `to_tree` was given."""
    fixed = {name: tuple(tree[name]) for name in ("advance", "highest", "start", "held")}
    return Live(**{**tree, **fixed})
