"""Keys and values of running answers: rows of any length, by layer, that decode in one pass.

Behind its prompt an answer is a row in every layer. Rows of like size share a tensor, so a long one
widens no short one, and layers may hold different numbers of tokens. Attention does not care about
the order of its keys, which carry their rotary phase: where tokens leave at every step, the next
one takes the place of one that left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmfast.core.kv import KVBlock
from mmfast.models.layers import SLIDING
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.lane import Attention, passing

STEP, SMALL = 64, 256  # tokens: tensors grow in steps; rows up to SMALL share one
# From the number of entries, in order of time, to those that leave before the next token.
Leaving = Callable[[int], Sequence[int]]


@dataclass(eq=False)
class Entries:
    """What a decoder layer holds of an answer behind its prompt.

    `keys` and `values` are `[H, n, d]` in order of time, and become `most` entries, the newest
    token included. Without `leaving` none leaves.
    """

    keys: Tensor
    values: Tensor
    most: int
    leaving: Leaving | None = None


@dataclass(eq=False)
class State:
    """What a convolution holds of an answer: its layer of a cache of one row."""

    layer: Any

    @property
    def states(self) -> Tensor:
        """The last inputs `[1, D, kernel]`."""
        states: Tensor = self.layer.conv_states[0]
        return states


@dataclass(eq=False)
class Held:
    """A layer whose policy reads and writes it itself: a layer of a cache of one row.

    It takes at most `bytes`. Of all its entries a step attends to those that `read` returns.
    """

    layer: Any
    bytes: int
    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class Row:
    """An answer behind its prompt: its parts by layer, and what acts on them at every step."""

    parts: Sequence[Entries | State | Held]
    driver: Callable[[], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the row will take at most, alone."""
        return sum(_bytes(part) for part in self.parts)


def _bytes(part: Entries | State | Held) -> int:
    if isinstance(part, Entries):
        heads, _, width = part.keys.shape
        return 2 * heads * width * part.keys.itemsize * room(part.most)
    return part.bytes if isinstance(part, Held) else part.states.nbytes


def room(most: int) -> int:
    """Return the entries that a row of `most` takes in a tensor of its own."""
    return -(-most // STEP) * STEP


def size_class(most: int) -> int:
    """Return the class of a row by its size: rows of a class differ by less than a factor of 2."""
    return max(SMALL, 1 << (most - 1).bit_length())


def taken(sizes: Iterable[int]) -> int:
    """Return the entries of memory that rows of these sizes take in one layer."""
    classes: dict[int, list[int]] = {}
    for most in sizes:
        classes.setdefault(size_class(most), []).append(most)
    return sum(rows * wide for rows, wide in map(shape, classes.values()))


def shape(sizes: Sequence[int]) -> tuple[int, int]:
    """Return rows, and entries per row, of the tensor that holds rows of one class."""
    return (1 << (len(sizes) - 1).bit_length(), room(max(sizes))) if sizes else (0, 0)


def entries(
    kv: KVBlock, kinds: Sequence[str], window: int, most: int
) -> list[Entries | State | Held]:
    """Return the entries of a whole prompt that becomes `most` tokens; windows hold their last."""
    found: list[Entries | State | Held] = []
    for kind, keys, values in zip(kinds, kv.keys, kv.values, strict=True):
        if kind == SLIDING:
            found.append(windowed(keys, values, window, most))
        else:
            found.append(Entries(keys, values, most))
    return found


def windowed(keys: Tensor, values: Tensor, window: int, most: int) -> Entries:
    """Return the entries of a sliding window over keys and values `[H, n, d]`."""
    start = max(0, keys.shape[1] - window + 1)
    return Entries(keys[:, start:], values[:, start:], min(most, window), beyond(window))


@lru_cache(maxsize=64)
def beyond(window: int) -> Leaving:
    """Return what leaves a sliding window before the next token; layers share one function."""
    return partial(_beyond, window)


def _beyond(window: int, n: int) -> Sequence[int]:
    return range(max(0, n - window + 1))


class Slots:
    """Places of one answer in the tensors of the layers in which it holds equally many entries."""

    def __init__(self, owner: int, length: int, part: Entries) -> None:
        self.owner, self.length, self.most = owner, length, max(part.most, length + 1)
        self.leaving = part.leaving
        self.order = list(range(length)) if part.leaving else []  # places in order of time
        self.free: list[int] = []  # places before `length` that are empty
        self.slot = -1  # of the newest token

    def advance(self) -> None:
        """Let entries leave, and find the place of the next token."""
        if self.leaving is None:
            self.slot, self.length = self.length, self.length + 1
            return
        for place in reversed(self.leaving(len(self.order))):
            self.free.append(self.order.pop(place))
        if self.free:
            self.slot = self.free.pop()
        else:
            self.slot, self.length = self.length, self.length + 1
        self.order.append(self.slot)


class Places:
    """Places of the next tokens of some rows, for all layers in which these share a tensor."""

    def __init__(self, rows: Sequence[Slots], device: torch.device) -> None:
        self.rows, self._device = rows, device
        self.numbers = torch.arange(len(rows), device=device)[:, None]
        self.at, self.mask, self.stop = self.numbers, None, 0  # type: Tensor, Tensor | None, int
        self.owners: Tensor | None = None  # None: the rows are all answers, in order

    def advance(self, count: int) -> None:
        """Find the places of one step of `count` answers."""
        lengths = [row.length for row in self.rows]
        self.at = torch.tensor([[row.slot] for row in self.rows], device=self._device)
        self.stop, self.mask = max(lengths), None
        holes = [(b, place) for b, row in enumerate(self.rows) for place in row.free]
        if holes or min(lengths) < self.stop:
            ends = torch.tensor(lengths, device=self._device)[:, None]
            self.mask = torch.arange(self.stop, device=self._device) < ends
            for b, place in holes:
                self.mask[b, place] = False
            self.mask = self.mask[:, None, None]  # [B, 1, 1, stop]
        owners = [row.owner for row in self.rows]
        same = owners == list(range(count))
        self.owners = None if same else torch.tensor(owners, device=self._device)


class Bucket:
    """Rows of one size class in one layer: a tensor `[2, rows, H, room, d]`."""

    def __init__(self) -> None:
        self.rows: list[Slots] = []
        self.own = RowBuffer()
        self.places: Places | None = None

    def fitted(self, like: Tensor | None) -> tuple[RowBuffer, Tensor | None] | None:
        """Return the tensor for the rows as they are now; None if that is the old one."""
        old, (rows, wide) = self.own.data, shape([row.most for row in self.rows])
        if old is not None and (old.shape[1], old.shape[3]) == (rows, wide):
            return None
        source = like if old is None else old
        if not rows or source is None:
            return self.own, None
        new = source.new_zeros(2, rows, source.shape[-3], wide, source.shape[-1])
        if old is not None:
            r, c = min(rows, old.shape[1]), min(wide, old.shape[3])
            new[:, :r, :, :c] = old[:, :r, :, :c]
        return self.own, new

    def put(self, part: Entries) -> None:
        """Copy entries to the last row."""
        assert self.own.data is not None
        row, length = self.own.data[:, len(self.rows) - 1], part.keys.shape[1]
        row[0, :, :length], row[1, :, :length] = part.keys, part.values
        # An earlier row may have left infinities, and 0 * inf is NaN.
        row[:, :, length:] = 0

    def drop(self, slots: Slots) -> None:
        """Remove a row; the last one takes its place."""
        number, last = self.rows.index(slots), len(self.rows) - 1
        if number != last:
            assert self.own.data is not None
            self.own.data[:, number] = self.own.data[:, last]
            self.rows[number] = self.rows[last]
        self.rows.pop()

    def attend(self, attention: Attention, query: Tensor, both: Tensor) -> Tensor:
        """Store new entries `[2, b, H, 1, d]` and attend to all of the rows."""
        places, count = self.places, len(self.rows)
        assert places is not None
        self.own.scatter(both, (places.numbers, places.at))
        keys, values = (self.own.read(p, 0, places.stop)[:count] for p in (0, 1))
        return attention(query, keys, values, places.mask)


class RowLayer:
    """What one decoder layer holds of all running answers."""

    def __init__(self) -> None:
        self.buckets: dict[int, Bucket] = {}
        self.held: dict[Row, Held] = {}
        self.state: Any = None  # the layer of a convolution, of all rows in order

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        rows = sum(bucket.own.nbytes for bucket in list(self.buckets.values()))
        state = 0 if self.state is None else self.state.conv_states[0].nbytes
        return rows + state + sum(layer_bytes(held.layer) for held in list(self.held.values()))


def layer_bytes(layer: Any) -> int:
    """Return the bytes of a layer of a cache."""
    known = getattr(layer, "nbytes", None)
    if isinstance(known, int):
        return known
    both = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(each.nbytes for each in both if isinstance(each, Tensor))


class RowStore:
    """Rows of all running answers, numbered from 0, in all layers; see the module."""

    def __init__(self, layers: int) -> None:
        self.layers = [RowLayer() for _ in range(layers)]
        self.rows: list[Row] = []
        self._slots: list[list[Slots]] = []  # of each row, all that differ
        self._places: list[Places] = []
        self._cache: Cache | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self.layers)

    def needed(self, more: Sequence[int] = ()) -> int:
        """Return the bound of memory, in tokens of all layers, with more rows of these sizes."""
        known: dict[tuple[int, ...], int] = {}
        total = 0
        for layer in self.layers:
            buckets = layer.buckets.values()
            sizes = tuple(row.most for bucket in buckets for row in bucket.rows)
            if sizes not in known:
                known[sizes] = taken([*sizes, *more])
            total += known[sizes]
        return -(-total // max(1, len(self.layers)))

    @property
    def held_bytes(self) -> int:
        """Return the most bytes of layers that policies read and write themselves."""
        return sum(held.bytes for layer in self.layers for held in list(layer.held.values()))

    def add(self, row: Row) -> int:
        """Copy what an answer holds behind its prompt; return the number of its row.

        Nothing is added where memory runs out.
        """
        number = len(self.rows)
        placed = _placed(row, number)
        self.rows.append(row)
        self._slots.append(list({id(slots): slots for _, slots in placed.values()}.values()))
        for index, (_, slots) in placed.items():
            bucket = self.layers[index].buckets.setdefault(size_class(slots.most), Bucket())
            bucket.rows.append(slots)
        try:
            self._fit({index: part.keys for index, (part, _) in placed.items()})
        except BaseException:
            for index, (_, slots) in placed.items():
                self.layers[index].buckets[size_class(slots.most)].rows.pop()
            self.rows.pop()
            self._slots.pop()
            raise
        for index, part in enumerate(row.parts):
            layer = self.layers[index]
            if isinstance(part, Entries):
                layer.buckets[size_class(placed[index][1].most)].put(part)
            elif isinstance(part, Held):
                layer.held[row] = part
            else:
                layer.state = _joined(layer.state, part)
        self._rearrange()
        # What was copied is not held twice.
        row.parts = [part for part in row.parts if isinstance(part, Held)]
        return number

    def remove(self, number: int) -> int | None:
        """Free a row; the last row takes its number and is returned, None if it was the last."""
        last, row, mine = len(self.rows) - 1, self.rows[number], self._slots[number]
        for layer in self.layers:
            layer.held.pop(row, None)
            for bucket in layer.buckets.values():
                for slots in [each for each in bucket.rows if each in mine]:
                    bucket.drop(slots)
            if layer.state is not None:
                _shrink(layer, number)
        self.rows[number], self._slots[number] = self.rows[last], self._slots[last]
        for slots in self._slots[number]:
            slots.owner = number
        self.rows.pop()
        self._slots.pop()
        self._fit({})
        self._rearrange()
        return None if number == last else last

    def row(self, number: int) -> KVBlock:
        """Return a copy of the keys and values `[H, m, d]` of a row, in order of time."""
        pairs = []
        for layer in self.layers:
            for bucket in layer.buckets.values():
                for b, slots in enumerate(bucket.rows):
                    if slots.owner == number:
                        order = slots.order or list(range(slots.length))
                        assert bucket.own.data is not None
                        pairs.append(bucket.own.data[:, b, :, order])
        return KVBlock(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))

    def advance(self) -> Cache:
        """Begin a step of all rows; return the cache that their pass is to get."""
        for row in self.rows:
            if row.driver is not None:
                row.driver()
        for mine in self._slots:
            for slots in mine:
                slots.advance()
        for places in self._places:
            places.advance(len(self.rows))
        assert self._cache is not None
        return self._cache

    def attend(
        self, index: int, attention: Attention, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Store a token of every answer in a layer and attend to what the answers hold there."""
        layer, out = self.layers[index], None
        both = torch.stack((key, value))  # [2, B, H, 1, d]
        for bucket in layer.buckets.values():
            if bucket.places is None:
                continue
            owners = bucket.places.owners
            if owners is None:
                return bucket.attend(attention, query, both)
            found = bucket.attend(attention, query[owners], both[:, owners])
            out = found.new_empty(len(query), *found.shape[1:]) if out is None else out
            out[owners] = found
        for number, row in enumerate(self.rows) if layer.held else ():
            if row in layer.held:
                one = slice(number, number + 1)
                held = layer.held[row]
                pair = held.read(*held.layer.update(key[one], value[one]))
                found = attention(query[one], *pair, None)
                out = found.new_empty(len(query), *found.shape[1:]) if out is None else out
                out[one] = found
        assert out is not None
        return out

    def _fit(self, like: dict[int, Tensor]) -> None:
        made = [
            fitted
            for index, layer in enumerate(self.layers)
            for bucket in layer.buckets.values()
            if (fitted := bucket.fitted(like.get(index))) is not None
        ]
        for own, new in made:  # all or nothing
            own.data = new

    def _rearrange(self) -> None:
        """Share the places of the next tokens among layers with the same rows in a tensor."""
        known: dict[tuple[int, ...], Places] = {}
        for layer in self.layers:
            layer.buckets = {size: b for size, b in layer.buckets.items() if b.rows}
            for bucket in layer.buckets.values():
                assert bucket.own.data is not None
                key = tuple(map(id, bucket.rows))
                if key not in known:
                    known[key] = Places(list(bucket.rows), bucket.own.data.device)
                bucket.places = known[key]
        self._places = list(known.values())
        self._cache = passing([layer.state for layer in self.layers])


def _placed(row: Row, number: int) -> dict[int, tuple[Entries, Slots]]:
    """Return the entries by layer, and slots that layers with equally many of them share."""
    shared: dict[tuple[int, int, Any], Slots] = {}
    found = {}
    for index, part in enumerate(row.parts):
        if isinstance(part, Entries):
            length = int(part.keys.shape[1])
            key = (length, part.most, part.leaving)
            found[index] = part, shared.setdefault(key, Slots(number, length, part))
    return found


def _joined(state: Any, part: State) -> Any:
    if state is None:
        return part.layer
    state.conv_states[0] = torch.cat([state.conv_states[0], part.states])
    return state


def _shrink(layer: RowLayer, number: int) -> None:
    states = layer.state.conv_states[0]
    states[number] = states[-1]
    layer.state.conv_states[0] = states[:-1].clone()
    if len(states) == 1:
        layer.state = None
