"""Rows that hold older entries in few bits: the packs of all of them are unpacked at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.models.kv.packing import Packing
from mmfast.ops.quantisation import PackedTensor, dequantise_rows, rows_of_bytes
from mmfast.serve.engine.kv.bucket import Entries, RowBucket, Slots, size_class
from mmfast.serve.engine.lane import AttentionCall, added


@dataclass(eq=False)
class PackedEntries(Entries):
    """Recent entries of a layer, and `packs` of those before.

    All together become `whole` entries. Rows whose packs have one `form`, bits and group, lie side
    by side; `bytes` bounds what is packed.
    """

    packs: Sequence[KVBlock] = ()
    store: Packing | None = None
    form: tuple[int, int] = (8, 32)
    whole: int = 0
    bytes: int = 0

    @property
    def place(self) -> Hashable:
        """Name of the tensors in which such rows lie."""
        return (*self.form, size_class(self.whole))

    def bucket(self) -> RowBucket:
        """Return an empty bucket of such rows."""
        return PackedBucket()


class _Side:
    """Packs of the keys, or of the values, of rows: codes `[R, H, N, bytes]`, and their scales."""

    def __init__(self, form: PackedTensor) -> None:
        codes, low, step = (x[..., :0].clone() for x in (form.codes, form.low, form.step))
        self.form = replace(form, codes=codes, low=low, step=step)
        self._every = form.group if form.along_tokens else 1  # tokens to a row of scales
        self.parts: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)

    def put(self, number: int, at: int, packs: Sequence[PackedTensor]) -> int:
        """Write packs behind the `at` tokens of a row, which may be new; return their tokens."""
        new = rows_of_bytes(packs)
        n = new[0].shape[-2]
        if not self.parts:
            self.parts = [part.new_zeros(0, len(part), 0, part.shape[-1]) for part in new]
        for i, (part, own) in enumerate(zip(new, self.parts, strict=True)):
            every = self._every if i else 1
            start, stop = at // every, (at + n) // every
            rows, room = max(0, number + 1 - len(own)), max(0, stop - own.shape[2])
            if rows or room:
                own = F.pad(own, (0, 0, 0, room, 0, 0, 0, rows))
            own[number, :, start:stop] = part
            self.parts[i] = own
        return n

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        for i, own in enumerate(self.parts):
            self.parts[i] = F.pad(own, (0, 0, 0, 0, 0, 0, 0, max(0, rows - len(own))))

    def drop(self, number: int, longest: int) -> None:
        """Remove a row; the last one takes its place, and the longest left is so long."""
        for i, own in enumerate(self.parts):
            own[number] = own[-1]
            stop = longest // (self._every if i else 1)
            self.parts[i] = own[:-1, :, :stop].clone()

    def unpack(self, out: Tensor) -> None:
        """Write all rows to `out` `[R, H, N, d]`."""
        codes, low, step = self.parts
        dequantise_rows(codes, low, step, self.form, out)


class PackedBucket(RowBucket):
    """Rows of one form and size class: recent entries in a tensor, older ones in packs."""

    def __init__(self) -> None:
        super().__init__()
        self._sides: tuple[_Side, _Side] | None = None
        self._seen: list[Tensor] = []  # by row, `[N]` False at what fills groups up
        self._mask: Tensor | None = None
        self._stores: list[PackedEntries] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.own.nbytes + sum(side.nbytes for side in self._sides or ())

    @property
    def bound(self) -> int:
        """Bytes that packs take at most."""
        return sum(part.bytes for part in self._stores)

    def put(self, part: Entries) -> None:
        """Copy entries to the last row."""
        super().put(part)
        assert isinstance(part, PackedEntries)
        self._stores.append(part)
        self._seen.append(torch.ones(0, dtype=torch.bool, device=part.keys.device))
        self._add(len(self.rows) - 1, part.packs)
        nothing = part.keys[:, :0].clone()  # a view would hold the prompt as it was, of all layers
        part.block = KVBlock((nothing,), (nothing,))  # not held twice
        part.packs = ()

    def drop(self, slots: Slots) -> None:
        """Remove a row; the last one takes its place."""
        number = self.rows.index(slots)
        super().drop(slots)
        self._seen[number], self._stores[number] = self._seen[-1], self._stores[-1]
        self._seen.pop()
        self._stores.pop()
        longest = max((len(each) for each in self._seen), default=0)
        for side in self._sides or ():
            side.grow(len(self.rows) + 1)
            side.drop(number, longest)
        self._mask = None

    def due(self, slots: Slots) -> int:
        """Return how many recent entries of a row are to be packed now."""
        store = self._stores[self.rows.index(slots)].store
        return 0 if store is None else store.due(slots.length)

    def pack(self, slots: Slots, count: int) -> None:
        """Pack the first recent entries of a row; its owner counts them off."""
        number = self.rows.index(slots)
        store, data = self._stores[number].store, self.own.data
        assert store is not None and data is not None
        recent = data[:, number, :, : slots.length].clone()
        self._add(number, store.packed(recent[0, :, :count], recent[1, :, :count]))
        data[:, number] = 0
        data[:, number, :, : slots.length - count] = recent[:, :, count:]

    def attend(self, attention: AttentionCall, query: Tensor, both: Tensor) -> Tensor:
        """Store new entries `[2, b, H, 1, d]` and attend to all of the rows."""
        places, count = self.places, len(self.rows)
        if self._sides is None or not any(len(each) for each in self._seen):
            return super().attend(attention, query, both)
        assert places is not None
        self.own.scatter(both, (places.into, places.at))
        recent = self.own.read(slice(None), 0, places.stop)[:, :count]  # [2, b, H, r, d]
        if self._mask is None:
            longest = max(len(each) for each in self._seen)
            seen = torch.stack([F.pad(s, (0, longest - len(s))) for s in self._seen])
            self._mask = added(seen[:, None, None], query.dtype)  # [B, 1, 1, packed]
            for side in self._sides:
                side.grow(count)
        packed = self._mask.shape[-1]
        whole = recent.new_empty(*recent.shape[:3], packed + places.stop, recent.shape[4])
        for side, out in zip(self._sides, whole, strict=True):
            side.unpack(out[:, :, :packed])
        whole[:, :, :, packed:] = recent
        if places.mask is None:
            mask = F.pad(self._mask, (0, places.stop))
        else:
            mask = torch.cat([self._mask, places.mask], -1)
        return attention(query, whole[0], whole[1], mask)

    def _add(self, number: int, packs: Sequence[KVBlock]) -> None:
        self._mask = None
        if not packs:
            return
        if self._sides is None:
            self._sides = _Side(packs[0].keys[0]), _Side(packs[0].values[0])
        at = len(self._seen[number])
        self._sides[0].put(number, at, [pack.keys[0] for pack in packs])
        self._sides[1].put(number, at, [pack.values[0] for pack in packs])
        for pack in packs:
            first: PackedTensor = pack.keys[0]
            real = torch.ones(first.n, dtype=torch.bool, device=self._seen[number].device)
            real = F.pad(real, (0, -first.n % first.group))
            self._seen[number] = torch.cat([self._seen[number], real])
