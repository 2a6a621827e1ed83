"""Live tokens of a stream: the blocks whose rows stand in the buffers of the layers, and places.

The planes of a buffer are keys before RoPE, rotated keys and values; attention reads the last two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.models.decoder.rotary import Angles, Rotary
from mmfast.ops.stream_cache import RowBuffer
from mmfast.streams.archive.files import value
from mmfast.streams.script import Piece

RAW, ROTATED, VALUES = range(3)


def same_length(buffers: Sequence[RowBuffer]) -> bool:
    """Tell whether all layers hold equally many tokens, so that one mask serves them all."""
    return len({buffer.length for buffer in buffers}) < 2


Start = tuple[int, ...]  # one position per axis

TEXT, VISUAL, MARKER = 0, 1, 2


@value
@dataclass(frozen=True, eq=False)
class LiveBlock:
    """A block of a stream whose keys stand in the buffers.

    `number` counts the blocks of the stream from 0; `kind`, `time`, `relative` (on the CPU),
    `advance`, `fresh` and `level` are those of its `Piece`.

    Attributes:
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
        """All layers hold the same tokens of it."""
        return len(self.held) < 2

    def tokens(self, layer: int) -> Tensor | None:
        """The tokens `[m]` that a layer holds, None for all."""
        if not self.held:
            return None
        return self.held[0] if self.even else self.held[layer]

    def size_at(self, layer: int) -> int:
        """Number of tokens that a layer holds."""
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

    `next` is where the next block starts, unless it is fresh; `top` is the highest position so far,
    -1 before the first.
    """

    next: Start
    top: int = -1

    @classmethod
    def behind(cls, blocks: Sequence[LiveBlock], axes: int) -> Cursor:
        """At the end of blocks, where they stand."""
        if not blocks:
            return cls((0,) * axes)
        last = blocks[-1]
        after = tuple(a + b for a, b in zip(last.start, last.advance, strict=True))
        return cls(after, max(block.top(block.start) for block in blocks))

    def start(self, block: LiveBlock | Piece) -> Start:
        """Return the start of a block at this place."""
        start = (self.top + 1,) * len(self.next) if block.fresh else self.next
        return (min(start),) * len(start) if block.level else start

    def place(self, block: LiveBlock) -> Start:
        """Start of a block, and on to its end."""
        start = self.start(block)
        self.next = tuple(a + b for a, b in zip(start, block.advance, strict=True))
        self.top = max(self.top, block.top(start))
        return start


def walk(blocks: Sequence[LiveBlock], axes: int) -> list[Start]:
    """Starts of blocks in a prompt made of them alone."""
    cursor = Cursor((0,) * axes)
    return [cursor.place(block) for block in blocks]


def live(piece: Piece, number: int, start: Start) -> LiveBlock:
    """Return the block that a piece becomes; MmfastError for an empty one or wrong shapes."""
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
    return LiveBlock(
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


class Turner:
    """Rotates keys of every layer of one model."""

    def __init__(self, rotary: Rotary, attentions: Sequence[Any]) -> None:
        self._rotary = rotary
        self._attentions = attentions
        self.axes = rotary.axes
        self.layers = len(attentions)

    def device(self, layer: int) -> torch.device:
        """Device of a layer."""
        found: torch.device = next(self._attentions[layer].parameters()).device
        return found

    def rotate(self, layer: int, keys: Tensor, positions: Tensor) -> Tensor:
        """Keys `[H, m, d]` before RoPE of a layer, rotated to positions `[A, m]`."""
        return self._rotary.rotate(self._attentions[layer], keys, positions)

    def move(
        self, buffers: Sequence[RowBuffer], blocks: Sequence[LiveBlock], starts: Sequence[Start]
    ) -> list[LiveBlock]:
        """Rotate every block of all layers that does not stand at its start; return them moved."""
        even = all(block.even for block in blocks)
        known: dict[torch.device, Angles] = {}  # layers of a device that hold the same share them
        for layer, buffer in enumerate(buffers):
            self.move_layer(layer, buffer, blocks, starts, known if even else None)
        return [replace(b, start=start) for b, start in zip(blocks, starts, strict=True)]

    def move_layer(
        self,
        layer: int,
        buffer: RowBuffer,
        blocks: Sequence[LiveBlock],
        starts: Sequence[Start],
        known: dict[torch.device, Angles] | None = None,
    ) -> None:
        """Rotate blocks at the beginning of the buffer of one layer to their starts.

        `blocks` are in the order of the buffer; `known` has angles for the same move in other
        layers, by device.
        """
        moved = [start != b.start for b, start in zip(blocks, starts, strict=True)]
        if not any(moved):
            return
        first, end = moved.index(True), len(moved) - moved[::-1].index(True)
        at = sum(block.size_at(layer) for block in blocks[:first])
        stop = at + sum(block.size_at(layer) for block in blocks[first:end])
        raw, known = buffer.read(RAW, at, stop), {} if known is None else known
        if not raw.shape[1]:
            return
        if raw.device not in known:
            pairs = zip(blocks[first:end], starts[first:end], strict=True)
            places = torch.cat([block.positions(layer, start) for block, start in pairs], 1)
            known[raw.device] = self._rotary.angles(places, raw, layer)
        turned = self._rotary.turn(self._attentions[layer], raw, known[raw.device])
        buffer.read(ROTATED, at, stop).copy_(turned)
