"""Keys and values of running answers: rows of any length, by layer, that decode in one pass.

Behind its prompt an answer is a row in every layer. Rows of like size share a tensor, so a long one
widens no short one, and layers may hold different numbers of tokens. Attention does not care about
the order of its keys, which carry their rotary phase: where tokens leave at every step, the next
one takes the place of one that left.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from mmfast.core.kv import KVBlock
from mmfast.core.trace import Trace
from mmfast.models.wrappers import SLIDING
from mmfast.serve.engine.kv.bucket import Entries, Places, RowBucket, Slots, taken, windowed
from mmfast.serve.engine.kv.packed_rows import PackedBucket
from mmfast.serve.engine.lane import AttentionCall, passing


@dataclass(eq=False)
class State:
    """State of a convolution: its layer of a cache of one row."""

    layer: Any

    @property
    def states(self) -> Tensor:
        """The last inputs `[1, D, kernel]`."""
        states: Tensor = self.layer.conv_states[0]
        return states


@dataclass(eq=False)
class Held:
    """A layer whose policy reads and writes it itself: a layer of a cache of one row.

    It takes at most `bytes`. `attend(attention, query, key, value)` stores a token and attends.
    """

    cache: Any
    index: int
    bytes: int
    attend: Callable[[AttentionCall, Tensor, Tensor, Tensor], Tensor]

    @property
    def layer(self) -> Any:
        """The layer as it is now: its policy may put another in its place."""
        return self.cache.layers[self.index]


@dataclass(eq=False)
class AnswerRow:
    """An answer behind its prompt: its parts by layer, and what acts on them at every step.

    `count` are the tokens that it reads in this step; of a tree, `paths` are the ways from its root
    to each of them. A policy that reads a part at each step tells in `trace` what it has read.
    """

    parts: Sequence[Entries | State | Held]
    driver: Callable[[], None] | None = None
    trace: Trace | None = None
    count: int = 1
    paths: Sequence[Sequence[int]] | None = None


def entries(
    kv: KVBlock, kinds: Sequence[str], window: int, most: int
) -> list[Entries | State | Held]:
    """Return the entries of a whole prompt that becomes `most` tokens; windows hold their last."""
    found: list[Entries | State | Held] = []
    for kind, keys, values in zip(kinds, kv.keys, kv.values, strict=True):
        if kind == SLIDING:
            found.append(windowed(keys, values, window, most))
        else:
            found.append(Entries(KVBlock((keys,), (values,)), most))
    return found


def reads_trees(row: AnswerRow) -> bool:
    """Return True if a row may read a tree: all of its entries stay, as they are."""
    return all(type(part) is Entries and part.leaving is None for part in row.parts)


def with_room(row: AnswerRow, most: int, views: bool = False) -> AnswerRow:
    """Let the entries of a row whose oldest leave have room for drafts, which may fall.

    Those of `views` may stand still while others draft, and have a place for that; so have trees.
    """
    for part in row.parts:
        if isinstance(part, Entries) and (views or part.leaving is not None):
            part.most += most + 1
    return row


class RowLayer:
    """Rows of all running answers in one decoder layer."""

    def __init__(self) -> None:
        self.buckets: dict[Hashable, RowBucket] = {}
        self.held: dict[AnswerRow, Held] = {}
        self.state: Any = None  # the layer of a convolution, of all rows in order

    def find(self, mine: Collection[Slots]) -> tuple[RowBucket, int, Slots] | None:
        """Return where the row of one of these slots lies: its tensor, and its number there."""
        for bucket in self.buckets.values():
            for number, slots in enumerate(bucket.rows):
                if slots in mine:
                    return bucket, number, slots
        return None

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        rows = sum(bucket.nbytes for bucket in list(self.buckets.values()))
        state = 0 if self.state is None else self.state.conv_states[0].nbytes
        return rows + state + sum(layer_bytes(held.layer) for held in list(self.held.values()))


def layer_bytes(layer: Any) -> int:
    """Return the bytes of a layer of a cache."""
    known = getattr(layer, "nbytes", None)
    if isinstance(known, int):
        return known
    both = (getattr(layer, "keys", None), getattr(layer, "values", None))
    return sum(each.nbytes for each in both if isinstance(each, Tensor))


class AnswerRows:
    """Rows of all running answers, numbered from 0, in all layers; see the module."""

    def __init__(self, layers: int, attending: Collection[int] | None = None) -> None:
        self.layers = [RowLayer() for _ in range(layers)]
        # layers with keys and values: all, or those named
        self._attending = range(layers) if attending is None else attending
        self.rows: list[AnswerRow] = []
        self.failed: dict[AnswerRow, Exception] = {}  # rows whose policy broke in this step
        self._slots: list[list[Slots]] = []  # of each row, all that differ
        self._places: list[Places] = []
        self.cache: Cache | None = None
        self._changed = False  # rows have come or gone since the last step

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self.layers)

    def needed(self, more: Sequence[int] = ()) -> int:
        """Return the bound of memory, in tokens of all layers, with more rows of these sizes."""
        known: dict[tuple[int, ...], int] = {}
        total = 0
        for layer in (self.layers[index] for index in self._attending):
            buckets = list(layer.buckets.values())
            sizes = tuple(row.most for bucket in buckets for row in bucket.rows)
            if sizes not in known:
                known[sizes] = taken([*sizes, *more])
            total += known[sizes]
        return -(-total // len(self._attending))

    @property
    def held_bytes(self) -> int:
        """Return the most bytes of layers that policies read and write themselves."""
        parts = [held.bytes for layer in self.layers for held in list(layer.held.values())]
        packs = [b.bound for b in self._buckets() if isinstance(b, PackedBucket)]
        return sum(parts) + sum(packs)

    def add(self, row: AnswerRow) -> int:
        """Copy what an answer holds behind its prompt; return the number of its row.

        Nothing is added where memory runs out.
        """
        number = len(self.rows)
        placed = _placed(row, number)
        self.rows.append(row)
        self._slots.append(list({id(slots): slots for _, slots in placed.values()}.values()))
        for index, (part, slots) in placed.items():
            buckets = self.layers[index].buckets
            if slots.place not in buckets:
                buckets[slots.place] = part.bucket()
            buckets[slots.place].rows.append(slots)
        try:
            self._fit({index: part.keys for index, (part, _) in placed.items()})
        except BaseException:
            for index, (_, slots) in placed.items():
                self.layers[index].buckets[slots.place].rows.pop()
            self.rows.pop()
            self._slots.pop()
            raise
        for index, given in enumerate(row.parts):
            layer = self.layers[index]
            if isinstance(given, Entries):
                layer.buckets[placed[index][1].place].put(given)
            elif isinstance(given, Held):
                layer.held[row] = given
            else:
                layer.state = _joined(layer.state, given)
        self._changed = True
        # What was copied is not held twice.
        row.parts = [part for part in row.parts if isinstance(part, Held)]
        return number

    def remove(self, number: int) -> int | None:
        """Free a row; the last row takes its number and is returned, None if it was the last."""
        last, row, mine = len(self.rows) - 1, self.rows[number], self._slots[number]
        self.failed.pop(row, None)
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
        self._changed = True
        return None if number == last else last

    def take(self, number: int) -> AnswerRow | None:
        """Remove a row and return what it holds; None, and nothing removed, where it stays.

        Rows of convolutions, packs, and layers that policies read themselves stay.
        """
        parts: list[Entries] = []
        if self.rows[number].driver is not None:
            return None
        for layer in self.layers:
            mine = [
                (bucket, slots)
                for bucket in layer.buckets.values()
                for slots in bucket.rows
                if slots in self._slots[number]
            ]
            if len(mine) != 1 or type(mine[0][0]) is not RowBucket:
                return None
            parts.append(mine[0][0].copied(mine[0][1]))
        self.remove(number)
        return AnswerRow(parts)

    def advance(
        self,
        counts: Sequence[int] | None = None,
        further: bool = False,
        paths: Sequence[Sequence[Sequence[int]] | None] | None = None,
    ) -> None:
        """Begin a step of all rows; `cache` is what their pass is to get.

        `counts` are the tokens that each of them reads, None is one; see `settle`. `further` tokens
        belong to the step that has begun. Rows with several tokens hold entries alone, and none of
        those that read a tree leave. A row that reads none stays as it is.
        """
        for number, row in enumerate(self.rows):
            row.count = 1 if counts is None else counts[number]
            row.paths = None if paths is None else paths[number]
            if row.driver is not None and row.count:
                row.driver()
        self._pack()
        for row, mine in zip(self.rows, self._slots, strict=True):
            for slots in mine:
                slots.advance(row.count, further)
        self.arrange()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let passes read `further` tokens behind the last step, and take all of them back."""
        for slots in itertools.chain(*self._slots):
            slots.advance(0)
        try:
            yield
        finally:
            for slots in itertools.chain(*self._slots):
                slots.settle(0)

    @torch.inference_mode()
    def settle(self, number: int, kept: int, path: Sequence[int] | None = None) -> None:
        """Take back all but the first `kept` tokens that a row has read in this step.

        Of a tree those on a `path` stand, and take the places of the first.
        """
        moved = path is not None and list(path) != list(range(kept))
        for layer in self.layers if moved else ():
            if path is not None and (at := layer.find(self._slots[number])) is not None:
                bucket, row, slots = at
                assert bucket.own.data is not None
                data, stand = bucket.own.data[:, row], [slots.slots[node] for node in path]
                data[:, :, slots.slots[: len(path)]] = data[:, :, stand]
        for slots in self._slots[number]:
            slots.settle(kept)

    def copy_from(self, other: AnswerRows, theirs: int, mine: int, count: int) -> None:
        """Append to a row the first tokens that a row of `other` has read in its last step."""
        for slots in self._slots[mine]:
            slots.advance(count)
        for own, source in zip(self.layers, other.layers, strict=True):
            if (to := own.find(self._slots[mine])) is None:
                continue
            at = source.find(other._slots[theirs])
            assert at is not None
            (bucket, number, slots), (origin, row, known) = to, at
            assert bucket.own.data is not None and origin.own.data is not None
            new = origin.own.data[:, row][:, :, known.slots[:count]]  # [2, H, n, d]
            bucket.own.data[:, number, :, slots.slots] = new
        for slots in self._slots[mine]:
            slots.settle(count)

    def arrange(self) -> None:
        """Find the places of the next tokens, also again after rows of a begun step have left."""
        if self._changed:
            self._rearrange()
        counts = [row.count for row in self.rows]
        for places in self._places:
            places.advance(counts if self.spread else None, [row.paths for row in self.rows])

    @property
    def spread(self) -> bool:
        """Rows read other numbers of tokens than one each: `attend_flat` attends to them."""
        return any(row.count != 1 for row in self.rows)

    def attend_flat(
        self, index: int, attention: AttentionCall, query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        """Attend as `attend` does, for tokens in one row `[1, H, T, d]`: `[1, T, H, d]`."""
        if self.spread:
            return self._attend_spread(index, attention, query, torch.stack((key, value)))
        tokens = (each[0].transpose(0, 1)[:, :, None] for each in (query, key, value))
        return self.attend(index, attention, *tokens).transpose(0, 1)

    def attend(
        self, index: int, attention: AttentionCall, query: Tensor, key: Tensor, value: Tensor
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
            mine = query.index_select(0, owners), both.index_select(1, owners)
            found = bucket.attend(attention, *mine)
            out = found.new_empty(len(query), *found.shape[1:]) if out is None else out
            out.index_copy_(0, owners, found)
        for number, row in enumerate(self.rows) if layer.held else ():
            if row in layer.held:
                one = slice(number, number + 1)
                found = self._own(layer, row, attention, query[one], key[one], value[one])
                out = found.new_empty(len(query), *found.shape[1:]) if out is None else out
                out[one] = found
        assert out is not None
        return out

    def _attend_spread(
        self, index: int, attention: AttentionCall, query: Tensor, both: Tensor
    ) -> Tensor:
        """Attend with the tokens of all answers in one row, keys and values `[2, 1, H, T, d]`."""
        layer = self.layers[index]
        out = query.new_empty(query.shape[2], query.shape[1], both.shape[-1])  # [T, H, d]
        for bucket in layer.buckets.values():
            if (places := bucket.places) is None or places.index is None:
                continue
            mine = query[0][:, places.index].transpose(0, 1)  # [B, H, n, d]
            pairs = both[:, 0][:, :, places.index].transpose(1, 2)  # [2, B, H, n, d]
            found = bucket.attend(attention, mine, pairs)  # [B, n, H, d]
            out[places.targets] = found.reshape(-1, *out.shape[1:])[places.real]
        at = 0
        for row in self.rows:
            if row in layer.held and row.count:  # rows of such policies read one token
                one = slice(at, at + 1)
                given = query[:, :, one], *both[..., one, :]
                out[one] = self._own(layer, row, attention, *given)[0]
            at += row.count
        return out[None]

    def _own(
        self, layer: RowLayer, row: AnswerRow, attention: AttentionCall, query: Tensor, *new: Tensor
    ) -> Tensor:
        """Attend with a row through its policy, `[1, n, H, d]`; if that fails, it fails alone."""
        if row not in self.failed:
            try:
                return layer.held[row].attend(attention, query, *new)
            except Exception as error:
                self.failed[row] = error
        return query.new_zeros(1, query.shape[2], query.shape[1], new[1].shape[-1])

    def _buckets(self) -> list[RowBucket]:
        return [bucket for layer in self.layers for bucket in list(layer.buckets.values())]

    def _pack(self) -> None:
        """Pack the recent entries of rows of which enough have come."""
        packed = [bucket for bucket in self._buckets() if isinstance(bucket, PackedBucket)]
        due: dict[Slots, int] = {}
        for bucket in packed:
            for slots in bucket.rows:
                if slots.length >= slots.most - 1 and (count := bucket.due(slots)):
                    bucket.pack(slots, count)
                    due[slots] = count
        for slots, count in due.items():
            slots.length -= count

    def _fit(self, like: dict[int, Tensor]) -> None:
        made = [
            fitted
            for index, layer in enumerate(self.layers)
            for bucket in list(layer.buckets.values())
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
                    made = list(bucket.rows), len(self.rows), bucket.own.data
                    known[key] = Places(*made)
                bucket.places = known[key]
        self._places, self._changed = list(known.values()), False
        self.cache = passing([layer.state for layer in self.layers])


def _placed(row: AnswerRow, number: int) -> dict[int, tuple[Entries, Slots]]:
    """Return the entries by layer, and slots that layers with equally many of them share."""
    shared: dict[tuple[Any, ...], Slots] = {}
    found = {}
    for index, part in enumerate(row.parts):
        if isinstance(part, Entries):
            length = int(part.keys.shape[1])
            key = (length, part.most, part.leaving, part.place)
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
