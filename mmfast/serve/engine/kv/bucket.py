"""Rows of like size in one decoder layer, in one tensor, and the places of their next tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from mmfast.core.kv import KVBlock
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.lane import AttentionCall, added

STEP, SMALL = 64, 256  # tokens: tensors grow in steps; rows up to SMALL share one
# From the number of entries, in order of time, to those that leave before the next token.
Leaving = Callable[[int], Sequence[int]]


@dataclass(eq=False)
class Entries:
    """Keys and values of an answer in a decoder layer, behind its prompt.

    `block` has keys and values `[H, n, d]` in order of time, which become `most` entries, the
    newest token included. Without `leaving` none leaves.
    """

    block: KVBlock
    most: int
    leaving: Leaving | None = None

    @property
    def keys(self) -> Tensor:
        """Keys `[H, n, d]`."""
        keys: Tensor = self.block.keys[0]
        return keys

    @property
    def values(self) -> Tensor:
        """Values `[H, n, d]`."""
        values: Tensor = self.block.values[0]
        return values

    @property
    def place(self) -> Hashable:
        """Name of the tensor in which such rows lie."""
        return size_class(max(self.most, self.keys.shape[1] + 1))

    def bucket(self) -> RowBucket:
        """Return an empty bucket of such rows."""
        return RowBucket()


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


def windowed(keys: Tensor, values: Tensor, window: int, most: int) -> Entries:
    """Return the entries of a sliding window over keys and values `[H, n, d]`."""
    start = max(0, keys.shape[1] - window + 1)
    last = KVBlock((keys[:, start:],), (values[:, start:],))
    return Entries(last, min(most, window), beyond(window))


@lru_cache(maxsize=64)
def beyond(window: int) -> Leaving:
    """Return what leaves a sliding window before the next token; layers share one function."""
    return partial(_beyond, window)


def _beyond(window: int, n: int) -> Sequence[int]:
    return range(max(0, n - window + 1))


class Slots:
    """Places of one answer in the tensors of the layers in which it holds equally many entries.

    A step may read several tokens of which only the first ones stand, see `settle`. What leaves in
    front of a token keeps its place until then, and later tokens no longer see it.
    """

    def __init__(self, owner: int, length: int, part: Entries) -> None:
        self.owner, self.length, self.most = owner, length, max(part.most, length + 1)
        self.place, self.leaving = part.place, part.leaving
        self.order = list(range(length)) if part.leaving else []  # places in order of time
        self.free: list[int] = []  # places before `length` that are empty
        self.slots: list[int] = []  # of the tokens of this step, the newest last
        # places that the tokens of a step see, in order of time, where entries leave
        self.orders: list[list[int]] = []

    @property
    def slot(self) -> int:
        """Place of the newest token."""
        return self.slots[-1] if self.slots else -1

    def advance(self, count: int = 1, further: bool = False) -> None:
        """Let entries leave, and find the places of the next tokens.

        `further` tokens belong to the step that has begun, and `settle` takes all of them back.
        """
        if not further:
            self.slots, self.orders = [], []
        for _ in range(count):
            if self.leaving is None:
                self.slots.append(self.length)
                self.length += 1
            elif self.slots:
                self._follow(self.leaving)
            else:
                self._lead(self.leaving)

    def _lead(self, leaving: Leaving) -> None:
        """Place the first token of a step, which stands: what leaves is gone for good."""
        for place in reversed(leaving(len(self.order))):
            self.free.append(self.order.pop(place))
        self._put(self.order)

    def _follow(self, leaving: Leaving) -> None:
        """Place a token that may fall."""
        gone = set(leaving(len(self.order)))
        self.order = [slot for place, slot in enumerate(self.order) if place not in gone]
        self._put(self.order)

    def _put(self, order: list[int]) -> None:
        if self.free:
            slot = self.free.pop()
        else:
            slot, self.length = self.length, self.length + 1
        self.slots.append(slot)
        order.append(slot)
        self.orders.append(order)

    def settle(self, kept: int) -> None:
        """Take back all but the first tokens of a step, with what left in front of them."""
        if not self.slots:
            return
        if self.leaving is None:
            self.length -= len(self.slots) - kept
        elif len(self.slots) > 1 or not kept:
            self.order = [*(self.orders[kept - 1] if kept else self.orders[0][:-1])]
            held = set(self.order)
            self.free = [place for place in range(self.length) if place not in held]
        self.slots, self.orders = self.slots[:kept], self.orders[:kept]


class Places:
    """Places of the next tokens of some rows, for all layers in which these share a tensor.

    Where rows read several tokens, they are as wide as the one with most: the others repeat their
    last one, which is stored and seen as it is once, and one that reads none repeats another row.
    `index` `[B, n]` are then places in the list of the tokens of all answers, None where no row
    reads any, `real` those of `[B * n]` that are no repetition, and `into` the rows `[B, 1]` that
    store them.
    """

    def __init__(self, rows: Sequence[Slots], answers: int, like: Tensor) -> None:
        self.index: Tensor | None = None
        self.real, self.targets = torch.empty(0), torch.empty(0)
        self.rows, self._device, self._dtype = rows, like.device, like.dtype
        self.numbers = torch.arange(len(rows), device=like.device)[:, None]
        self.into = self.numbers
        self.at, self.mask, self.stop = self.numbers, None, 0  # type: Tensor, Tensor | None, int
        self._added: Tensor | None = None  # `[B, 1, 1, room]`, the mask of all places
        self._lengths = [0] * len(rows)
        owners = [row.owner for row in rows]
        self.owners: Tensor | None = None  # None: the rows are all answers, in order
        if owners != list(range(answers)):
            self.owners = torch.tensor(owners, device=like.device)

    def advance(
        self,
        counts: Sequence[int] | None = None,
        paths: Sequence[Sequence[Sequence[int]] | None] = (),
    ) -> None:
        """Find the places of one step; `counts` are the tokens of each answer, None one each.

        A token of a tree sees its path, of all tokens of the step.
        """
        self.index, self.into = None, self.numbers
        if counts is not None:
            self._spread(counts, paths)
            return
        lengths = [row.length for row in self.rows]
        self.at = torch.tensor([[row.slot] for row in self.rows], device=self._device)
        self.stop, self.mask = max(lengths), None
        if any(now < before for now, before in zip(lengths, self._lengths, strict=True)):
            self._added = None  # a row has packed entries, whose places it sees no more
        self._lengths = lengths
        holes = [(b, place) for b, row in enumerate(self.rows) for place in row.free]
        if not holes and min(lengths) == self.stop:
            self._added = None
            return
        if self._added is None or self._added.shape[-1] < self.stop:
            ends = torch.tensor(lengths, device=self._device)[:, None]
            seen = torch.arange(room(self.stop), device=self._device) < ends
            self._added = added(seen[:, None, None], self._dtype)
        flat = self._added[:, 0, 0]
        flat[self.numbers, self.at] = 0
        if holes:
            rows, places = torch.tensor(holes, device=self._device).T
            flat[rows, places] = torch.finfo(self._dtype).min
        self.mask = self._added[..., : self.stop]  # [B, 1, 1, stop]

    def _spread(
        self, counts: Sequence[int], paths: Sequence[Sequence[Sequence[int]] | None]
    ) -> None:
        """Find the places of a step in which an answer reads `counts` of its tokens, maybe none."""
        self._added = None
        starts = [0, *itertools.accumulate(counts)]
        numbers = [counts[row.owner] for row in self.rows]
        if not any(numbers):
            return
        reading = next(b for b, n in enumerate(numbers) if n)
        stores, wide = [b if n else reading for b, n in enumerate(numbers)], max(numbers)
        self.stop = max(self.rows[b].length for b in stores)
        index, at, real = list[list[int]](), list[list[int]](), list[int]()
        seen = torch.zeros(len(self.rows), wide, self.stop, dtype=torch.bool)
        for b, own in enumerate(stores):
            row, n = self.rows[own], numbers[own]
            slots = row.slots[len(row.slots) - n :]
            last = [min(i, n - 1) for i in range(wide)]
            index.append([starts[row.owner] + i for i in last])
            at.append([slots[i] for i in last])
            real += [b * wide + i for i in range(n)] if own == b else []
            for i, place in enumerate(last):
                if (tree := paths[row.owner]) is not None:
                    seen[b, i, : row.slots[0]] = True
                    seen[b, i, [row.slots[node] for node in tree[place]]] = True
                elif row.leaving is None:
                    seen[b, i, : slots[place] + 1] = True
                else:
                    seen[b, i, row.orders[len(row.orders) - n + place]] = True
        self.index = torch.tensor(index, device=self._device)
        self.at = torch.tensor(at, device=self._device)
        self.into = torch.tensor(stores, device=self._device)[:, None]
        self.real = torch.tensor(real, device=self._device)
        self.targets = self.index.flatten()[self.real]
        self.mask = added(seen.to(self._device)[:, None], self._dtype)  # [B, 1, n, stop]


class RowBucket:
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

    def copied(self, slots: Slots) -> Entries:
        """Return copies of the entries of a row, in order of time."""
        assert self.own.data is not None
        places = slots.order if slots.leaving else list(range(slots.length))
        keys, values = self.own.data[:, self.rows.index(slots)][:, :, places]
        return Entries(KVBlock((keys,), (values,)), slots.most, slots.leaving)

    def drop(self, slots: Slots) -> None:
        """Remove a row; the last one takes its place."""
        number, last = self.rows.index(slots), len(self.rows) - 1
        if number != last:
            assert self.own.data is not None
            self.own.data[:, number] = self.own.data[:, last]
            self.rows[number] = self.rows[last]
        self.rows.pop()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.own.nbytes

    def attend(self, attention: AttentionCall, query: Tensor, both: Tensor) -> Tensor:
        """Store new entries `[2, b, H, n, d]` and attend to all of the rows."""
        places, count = self.places, len(self.rows)
        assert places is not None
        self.own.scatter(both, (places.into, places.at))
        keys, values = self.own.read(slice(None), 0, places.stop)[:, :count]
        return attention(query, keys, values, places.mask)
