"""Live tokens of a stream: the blocks whose rows stand in the buffers of the layers, and places.

The planes of a buffer are keys before RoPE, rotated keys and values; attention reads the last two.
A packed one holds every key once, before RoPE and in few bits, and rotates it when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.kv import KVBlock
from mmfast.models.decoder.rotary import Angles, Rotary
from mmfast.ops.quantisation import PackedTensor, Quantiser, dequantise_row, unpacked
from mmfast.ops.stream_cache import RowBuffer, Span
from mmfast.streams.archive.archive import Found
from mmfast.streams.archive.files import value
from mmfast.streams.script import Piece

RAW, ROTATED, VALUES = range(3)


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

    def counted(self, layer: int | None = None) -> Tensor:
        """Kinds `[size]` of the tokens that count against the budget, or that a layer holds."""
        if layer is not None:
            held = self.tokens(layer)
            return self.kinds if held is None else self.kinds.index_select(0, held)
        longest = max(self.held, key=len) if self.held else None
        return self.kinds if longest is None else self.kinds.index_select(0, longest)

    def spots(self, layer: int) -> Tensor:
        """Places `[m]` in its frame of what a layer holds; -1 each where it is none."""
        held = self.tokens(layer)
        if not bool((self.kinds == VISUAL).any()):
            return torch.full((self.size_at(layer),), -1)
        return torch.arange(self.n) if held is None else held

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


def _part(pack: KVBlock, plane: int) -> PackedTensor | Tensor:
    """Keys or values of a block in few bits; in full precision where some rows have left."""
    part: PackedTensor = (pack.values if plane == VALUES else pack.keys)[0]
    rows = pack.kept[0]
    return part if rows is None else unpacked(part).index_select(-2, rows.to(part.codes.device))


def _cut(pack: KVBlock, start: int, stop: int) -> KVBlock:
    """Only a range of the rows that are left."""
    if (start, stop) == (0, pack.n):
        return pack
    rows = torch.arange(pack.n) if pack.kept[0] is None else pack.kept[0]
    return replace(pack, kept=(rows[start:stop],), relative=pack.relative[:, start:stop])


class PackedBuffer:
    """Rows of one layer of a stream: a pack for each of its first blocks, the latest as they are.

    It does what a `RowBuffer` does, and holds one for the latest rows. Rows that are read are
    unpacked, those of one layer at a time; `turn` rotates keys `[H, m, d]` to positions `[A, m]`.
    """

    def __init__(
        self,
        quantiser: Quantiser,
        turn: Callable[[Tensor, Tensor], Tensor],
        latest: RowBuffer,
        packs: Sequence[KVBlock] = (),
    ) -> None:
        self._quantiser, self._turn, self.latest = quantiser, turn, latest
        self.packs = list(packs)

    @property
    def _packed(self) -> int:
        return sum(pack.n for pack in self.packs)

    @property
    def length(self) -> int:
        """Rows of one conversation."""
        return self._packed + self.latest.length

    @length.setter
    def length(self, length: int) -> None:
        self.latest.length = length - self._packed

    @property
    def data(self) -> Tensor | None:
        """Tensor of the latest rows; None before the first."""
        return self.latest.data

    @property
    def alone(self) -> bool:
        """No other buffer writes to its tensors."""
        return self.latest.alone

    @property
    def nbytes(self) -> int:
        """Bytes of packs, and of the tensor of the latest rows."""
        packs = sum(pack.nbytes for pack in self.packs)
        return packs + self.latest.nbytes

    def fork(self, room: int) -> PackedBuffer:
        """Another buffer with the same rows and packs; see `RowBuffer`."""
        return PackedBuffer(self._quantiser, self._turn, self.latest.fork(room), self.packs)

    def write(self, *planes: Tensor, at: int | None = None) -> None:
        """Put rows at a place behind the packs; see `RowBuffer`."""
        self.latest.write(*planes, at=None if at is None else at - self._packed)

    def select(self, index: Tensor, n: int) -> None:
        """Of the last `n` rows written leave only some; see `RowBuffer`."""
        self.latest.select(index, n)

    def read(self, plane: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `[H, stop - start, d]` of one plane: a view, or unpacked ones."""
        stop, packed = self.length if stop is None else stop, self._packed
        if start >= packed:
            return self.latest.read(plane, start - packed, stop - packed)
        at, first, found = 0, start, list[KVBlock]()
        for pack in self.packs:
            if start < at + pack.n and at < stop:
                first = min(first, at)
                found.append(pack)
            at += pack.n
        parts: list[PackedTensor | Tensor] = [_part(pack, plane) for pack in found]
        n = sum(pack.n for pack in found)
        behind = self.latest.read(plane, 0, max(0, stop - packed))
        out = behind.new_empty(behind.shape[0], n + behind.shape[1], behind.shape[2])
        dequantise_row(parts, out[:, :n])
        if plane == ROTATED:
            out[:, :n] = self._turn(out[:, :n], torch.cat([pack.relative for pack in found], 1))
        out[:, n:] = behind
        return out.narrow(1, start - first, stop - start)

    def revise(self, plane: int, rows: Tensor, at: int) -> None:
        """Overwrite one plane of rows behind the packs."""
        self.latest.revise(plane, rows, at - self._packed)

    def place(self, layer: int, blocks: Sequence[LiveBlock], starts: Sequence[Any]) -> int:
        """Note where the first blocks stand now; returns how many of them are packed."""
        for i, (pack, block, start) in enumerate(zip(self.packs, blocks, starts, strict=False)):
            if block.start != start:
                self.packs[i] = replace(pack, relative=block.positions(layer, start))
        return len(self.packs)

    def keep(self, spans: Sequence[Span]) -> None:
        """Keep only these ranges, ascending, each of one block."""
        packed, at, left = self._packed, 0, list[KVBlock]()
        for pack in self.packs:
            for start, stop in spans:
                first, end = max(start - at, 0), min(stop - at, pack.n)
                if first < end:
                    left.append(_cut(pack, first, end))
            at += pack.n
        self.latest.keep([(max(a - packed, 0), b - packed) for a, b in spans if b > packed])
        self.packs = left

    def pack(self, layer: int, blocks: Sequence[LiveBlock]) -> None:
        """Pack the first of the latest blocks, while enough tokens behind them stay as they are."""
        at = 0
        for block in blocks[len(self.packs) :]:
            n = block.size_at(layer)
            if self.latest.length - at - n < self._quantiser.residual:
                break
            keys, values = (self.latest.read(plane, at, at + n) for plane in (RAW, VALUES))
            packed = (self._quantiser.pack(keys, keys=True),), (self._quantiser.pack(values),)
            self.packs.append(KVBlock(*packed, block.positions(layer), kept=(None,)))
            at += n
        if at:
            self.latest.keep([(at, self.latest.length)])

    def snapshot(self) -> Any:
        """Return all but positions as plain data; the latest rows are copies."""
        packs = [(pack.keys[0], pack.values[0], pack.kept[0]) for pack in self.packs]
        return {"packs": packs, "latest": copy_of(self.latest)}

    def restore(
        self, layer: int, tree: Any, blocks: Sequence[LiveBlock], device: torch.device
    ) -> Sequence[LiveBlock]:
        """Take over the packs of a snapshot; returns the blocks of the latest rows."""
        self.packs = []
        for (keys, values, rows), block in zip(tree["packs"], blocks, strict=False):
            places, both = block.positions(layer), (keys.to(device), values.to(device))
            self.packs.append(KVBlock(both[:1], both[1:], places, kept=(rows,)))
        return blocks[len(self.packs) :]


LayerBuffer = RowBuffer | PackedBuffer


def copy_of(buffer: LayerBuffer) -> Any:
    """Return keys before RoPE and values as plain data; None before the first row."""
    if isinstance(buffer, PackedBuffer):
        return buffer.snapshot()
    return None if buffer.data is None else (buffer.read(RAW).clone(), buffer.read(VALUES).clone())


@dataclass(eq=False)
class RecalledRows:
    """Stored tokens among the rows of one layer of a branch, `n` of them from row `at` on.

    `live` are the blocks before the `question` where the stream left them, `moved` where they
    stand now; `found` is the choice that the rows are of.
    """

    question: LiveBlock
    live: Sequence[LiveBlock]
    moved: Sequence[LiveBlock]
    at: int
    n: int = 0
    found: Sequence[Found] = ()

    def hold(self, found: Sequence[Found]) -> bool:
        """Tell whether the rows are of this choice."""
        return len(found) == len(self.found) and all(map(Found.same, found, self.found))

    def swap(self, buffer: LayerBuffer, planes: Sequence[Tensor]) -> int:
        """Put others `[H, m, d]` in their place; returns by how much the rows behind them move."""
        n, end = planes[0].shape[1] if planes else 0, self.at + self.n
        by, behind = n - self.n, list[Tensor]()
        if by and end < buffer.length:
            parts = (RAW, ROTATED, VALUES)
            behind = [buffer.read(part, end, buffer.length).clone() for part in parts]
        if planes:
            buffer.write(*planes, at=self.at)
        if behind:
            buffer.write(*behind, at=self.at + n)
        buffer.length += by
        self.n = n
        return by


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
        self, buffers: Sequence[LayerBuffer], blocks: Sequence[LiveBlock], starts: Sequence[Start]
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
        buffer: LayerBuffer,
        blocks: Sequence[LiveBlock],
        starts: Sequence[Start],
        known: dict[torch.device, Angles] | None = None,
    ) -> None:
        """Rotate blocks at the beginning of the buffer of one layer to their starts.

        `blocks` are in the order of the buffer; `known` has angles for the same move in other
        layers, by device.
        """
        done = buffer.place(layer, blocks, starts) if isinstance(buffer, PackedBuffer) else 0
        moved = [start != b.start for b, start in zip(blocks, starts, strict=True)]
        moved[:done] = [False] * done
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
        buffer.revise(ROTATED, turned, at)

    def move_rows(self, layer: int, buffer: LayerBuffer, at: int, positions: Tensor) -> None:
        """Rotate rows of the buffer of one layer, from `at` on, to positions `[A, m]`."""
        raw = buffer.read(RAW, at, at + positions.shape[1])
        buffer.revise(ROTATED, self.rotate(layer, raw, positions), at)
