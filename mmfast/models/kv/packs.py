"""Cache layers that hold older entries in few bits and unpack them when they are read.

A `PackedRow` is what a layer holds of one batch row beside its recent entries: packs, and which of
their entries stand where. The recent entries, in full precision, lie with those of the other rows
on the layer. Nothing is packed twice: an entry that a policy evicts from a pack is skipped when the
pack is read, and a pack goes when none of its entries is left.
"""

# ruff: noqa: D102 (methods of transformers are documented there)
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from mmfast.caches.store import Left, leave
from mmfast.core.errors import ModelError
from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction, gather_rows
from mmfast.models.kv.notes import KIND, PADDING, entries, fill
from mmfast.models.reduction.cache_layers import Shorter, StoreLayer, plain_kind, regroup, shorten
from mmfast.ops.quantisation import PackedPart, dequantise_row, quantise, quantise_apart
from mmfast.ops.ranking import complement


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Packs of one batch row in order of time, one per precision, beside its recent entries.

    A pack is a block of this layer alone: entries `[H, n, d]` in few bits, or (16 bits) as they
    were. `live` `[1 or H, m]` are the entries of packs and recent ones that are left, in order of
    time, as of when there were `covered` of them; what came since is left. None where all are.
    """

    packs: tuple[KVBlock, ...] = ()
    live: Tensor | None = None
    covered: int = 0

    @property
    def packed(self) -> int:
        """Entries per head in packs, evicted ones too."""
        return sum(map(_size, self.packs))

    @property
    def nbytes(self) -> int:
        """Bytes of packs and index."""
        index = 0 if self.live is None else self.live.nbytes
        return index + sum(pack.nbytes for pack in self.packs)

    def length(self, recent: int) -> int:
        """Entries per head that are left, with so many recent ones on the layer."""
        total = self.packed + recent
        return total if self.live is None else self.live.shape[1] + total - self.covered

    def read(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, m, d]` that are left; takes the recent ones `[H, r, d]`."""
        index = self.index(keys.shape[1])
        if self.packs:
            keys = _behind([p.keys[0] for p in self.packs], self.packed, keys)
            values = _behind([p.values[0] for p in self.packs], self.packed, values)
        if index is None:
            return keys, values
        index = index.to(keys.device)
        if len(index) == 1:
            return keys.index_select(1, index[0]), values.index_select(1, index[0])
        return gather_rows(keys, index), gather_rows(values, index)

    def index(self, recent: int) -> Tensor | None:
        """`live` with what came since, `[1 or H, m]`."""
        if self.live is None:
            return None
        more = torch.arange(self.covered, self.packed + recent, device=self.live.device)
        return torch.cat([self.live.long(), more.expand(len(self.live), -1)], 1)

    def add(self, packs: Sequence[KVBlock], order: Tensor | None, recent: int) -> PackedRow:
        """With the first of `recent` entries in packs, at places `order` `[n]` (None: in order)."""
        more = replace(self, packs=(*self.packs, *packs))
        if order is None:
            return more
        index, total = self.index(recent), self.packed + recent
        place = torch.arange(total, device=order.device)
        place[self.packed : self.packed + len(order)] = self.packed + order
        live = place[None] if index is None else place[index]
        return replace(more, live=live.to(torch.int32), covered=total)

    def keep(self, kept: Tensor, recent: int) -> PackedRow:
        """Only these of the entries that are left, `[H, m]` ascending."""
        index, total = self.index(recent), self.packed + recent
        live = kept if index is None else index.expand(len(kept), -1).gather(1, kept)
        return replace(self, live=live.to(torch.int32), covered=total)._without_empty_packs()

    def without_last(self, count: int, recent: int) -> PackedRow:
        """Take back `count` recent entries, which no policy evicted; `recent` are left."""
        total = self.packed + recent
        if self.live is None or self.covered <= total:
            return self
        return replace(
            self, live=self.live[:, : self.live.shape[1] - self.covered + total], covered=total
        )

    def _without_empty_packs(self) -> PackedRow:
        assert self.live is not None
        packs, live, covered, start = list[KVBlock](), self.live, self.covered, 0
        for pack in self.packs:
            n = _size(pack)
            if bool(((live >= start) & (live < start + n)).any()):
                packs.append(pack)
                start += n
            else:
                live = torch.where(live >= start, live - n, live)
                covered -= n
        return PackedRow(tuple(packs), live, covered)


def _size(pack: KVBlock) -> int:
    return int(pack.keys[0].shape[1])


def _behind(packs: Sequence[PackedPart], n: int, recent: Tensor) -> Tensor:
    """Packs of n entries unpacked, and the recent ones `[H, r, d]` behind: `[H, n + r, d]`."""
    row = recent.new_empty(len(recent), n + recent.shape[1], recent.shape[2])
    dequantise_row(packs, row[:, :n])
    row[:, n:] = recent
    return row


# `(x [H, n, d], whether keys) -> ` the same in few bits.
Packer = Callable[[Tensor, bool], Any]
# `(row, keys [H, n, d], values [H, n, d]) -> ` packs of them, and the order of `PackedRow.add`.
RowPacker = Callable[[int, Tensor, Tensor], tuple[list[KVBlock], Tensor | None]]


def split_packs(
    keys: Tensor, values: Tensor, chosen: Tensor, packers: tuple[Packer, Packer]
) -> tuple[list[KVBlock], Tensor]:
    """Packs of the entries `chosen` `[c]`, ascending, by the first packer, the rest by the second.

    Also returns the place of each entry in them.
    """
    parts = (chosen, complement(chosen, keys.shape[1]))
    packs = [
        KVBlock(
            (pack(keys.index_select(1, part), True),), (pack(values.index_select(1, part), False),)
        )
        for part, pack in zip(parts, packers, strict=True)
        if len(part)
    ]
    return packs, torch.cat(parts).argsort()


def in_groups(bits: int, x: Tensor, keys: bool) -> PackedPart:
    """Pack in groups of 32, as `quant` does; 16 bits are the numbers as they are."""
    return x if bits == 16 else quantise(x, bits, 32, along_tokens=keys)


def by_token(bits: int, x: Tensor, keys: bool) -> PackedPart:
    """Pack keys by channel, values by token with their channels apart: the scheme of ZipCache."""
    if bits == 16:
        return x
    return quantise(x, bits, x.shape[1], along_tokens=True) if keys else quantise_apart(x, bits)


def packs_of(keys: Tensor, values: Tensor, pack: Packer, size: int | None) -> list[KVBlock]:
    """Packs of at most `size` entries, or one of all."""
    pairs = zip(_packed(keys, pack, True, size), _packed(values, pack, False, size), strict=True)
    return [KVBlock((k,), (v,)) for k, v in pairs]


def _packed(x: Tensor, pack: Packer, keys: bool, size: int | None) -> list[Any]:
    full = 0 if size is None else x.shape[1] // size
    if size is None or full < 2:
        return [pack(part.contiguous(), keys) for part in x.split(size or x.shape[1], 1)]
    parts: list[Any] = pack(x[:, : full * size].unflatten(1, (full, size)), keys).apart()
    rest = x[:, full * size :]
    return [*parts, pack(rest.contiguous(), keys)] if rest.shape[1] else parts


class PackedLayer(Shorter, DynamicLayer):  # type: ignore[misc]
    """A layer whose `keys` and `values` are the recent entries in full precision.

    Rows are right-aligned: padding (`front`, per row), packs (`rows`), recent entries. `extra`
    counts the entries per row of the whole layer, minus those of `keys`.
    """

    _layer_type = None
    rows: tuple[PackedRow, ...] = ()
    front: tuple[int, ...] = ()
    in_packs = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        super().update(key_states, value_states, *args, **kwargs)
        return self.whole()

    def whole(self) -> tuple[Tensor, Tensor]:
        """Keys and values `[B, H, n, d]` of all entries that are left."""
        width = self.keys.shape[2] + self.extra
        parts = [
            row.read(self.keys[b, :, self.front[b] :], self.values[b, :, self.front[b] :])
            for b, row in enumerate(self.rows)
        ]
        return _stack([k for k, _ in parts], width), _stack([v for _, v in parts], width)

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return self.keys.nbytes + self.values.nbytes + sum(row.nbytes for row in self.rows)

    def crop(self, tokens_to_remove: int) -> None:
        count = -tokens_to_remove
        if count > min((self.keys.shape[2] - f for f in self.front), default=0):
            self.open()
        super().crop(tokens_to_remove)
        recent = self.keys.shape[2]
        self.rows = tuple(
            row.without_last(count, recent - f)
            for row, f in zip(self.rows, self.front, strict=True)
        )

    def open(self) -> None:
        """Unpack everything."""
        self.keys, self.values = self.whole()
        self.rows = tuple(PackedRow() for _ in self.rows)
        self.extra = 0  # first: the gaps are counted among the entries
        self.front = self._gaps()

    def _gaps(self) -> tuple[int, ...]:
        if self.notes is None:
            return (0,) * len(self.keys)
        real = (fill(self)[KIND] != PADDING).any(1)
        return tuple(int(n) for n in real.shape[1] - real.sum(1))

    def reset(self) -> None:
        super().reset()
        self.rows, self.front, self.extra = (), (), 0

    def _batch(self, change: Any) -> None:
        super()._batch(change)
        numbers = change(torch.arange(len(self.rows))).tolist()
        self.rows = tuple(self.rows[b] for b in numbers)
        self.front = tuple(self.front[b] for b in numbers)


def _stack(rows: Sequence[Tensor], width: int) -> Tensor:
    if len(rows) == 1 and rows[0].shape[1] == width:
        return rows[0][None]
    return torch.stack([F.pad(row, (0, 0, width - row.shape[1], 0)) for row in rows])


def packed_layer(cache: Any, index: int, aligned: bool = False) -> PackedLayer:
    """Shortened layer `index` of a cache with notes, made able to hold packs."""
    layer = cache.layers[index]
    if layer.in_packs:
        return layer  # type: ignore[no-any-return]
    if not aligned:
        align(cache, index)
    made: Any = object.__new__(PackedLayer)
    made.__dict__ = layer.__dict__  # the same tensors, now and later
    cache.layers[index] = made
    made.rows = tuple(PackedRow() for _ in range(len(layer.keys)))
    made.front, made.extra = made._gaps(), 0
    return made  # type: ignore[no-any-return]


def align(cache: Any, index: int) -> None:
    """Put all padding of a layer in front."""
    layer = cache.layers[index]
    notes = fill(layer)
    real = notes[KIND][:, 0] != PADDING
    if not bool((real[:, :-1] & ~real[:, 1:]).any()):
        return
    where = [row.nonzero()[:, 0] for row in real]
    heads = layer.keys.shape[1]
    same = [Reduction.identity(len(w), (heads,), w.device) for w in where]
    left = leave(layer.keys, layer.values, notes, where, same)
    before = entries(layer)
    (layer.keys,), (layer.values,) = left.kv.keys, left.kv.values
    settle(cache, index, left, before)


def settle(cache: Any, index: int, left: Left, before: int) -> None:
    """Note what is left of the `before` entries of a layer, and give it the mask it needs."""
    layer, gone = cache.layers[index], before - left.width
    layer.notes, layer.valid = left.notes, left.valid
    layer.gone, layer.dropped = layer.gone + gone, layer.dropped + gone
    regroup(cache, index)


def pack_recent(layer: PackedLayer, packer: RowPacker, due: Callable[[int], int]) -> None:
    """Pack the first recent entries of each row, as many as are `due` of so many."""
    recent = [layer.keys.shape[2] - f for f in layer.front]
    moving = [due(r) for r in recent]
    if not any(moving):
        return
    width = layer.keys.shape[2] + layer.extra
    rows, keys, values = [], [], []
    for b, (row, count) in enumerate(zip(layer.rows, moving, strict=True)):
        k, v = layer.keys[b, :, layer.front[b] :], layer.values[b, :, layer.front[b] :]
        rows.append(row.add(*packer(b, k[:, :count], v[:, :count]), recent[b]) if count else row)
        keys.append(k[:, count:])
        values.append(v[:, count:])
    longest = max(k.shape[1] for k in keys)
    # Copied: a view would keep the packed entries alive.
    layer.keys, layer.values = (_stack(x, longest).clone() for x in (keys, values))
    layer.rows, layer.extra = tuple(rows), width - longest
    layer.front = tuple(longest - k.shape[1] for k in keys)


def keep_packed(layer: PackedLayer, kept: Sequence[Tensor]) -> None:
    """Evict entries of a layer with packs: per row those of its entries that stay, `[H, m]`."""
    recent = layer.keys.shape[2]
    layer.rows = tuple(
        row.keep(mine, recent - f)
        for row, mine, f in zip(layer.rows, kept, layer.front, strict=True)
    )
    layer.extra = max(mine.shape[1] for mine in kept) - recent


# Layers of a stock cache that may lose entries; the second has a recurrence beside attention.
_SHRINKABLE = (DynamicLayer, LinearAttentionAndFullAttentionLayer)


def shrinkable(cache: Any, index: int) -> Any:
    """Layer `index` of a cache, made able to lose entries; ModelError for a kind that cannot."""
    layer = cache.layers[index]
    kind = plain_kind(layer)
    if kind in _SHRINKABLE and not isinstance(layer, StoreLayer):
        return shorten(cache, index)
    raise ModelError(
        f"cache layer {index} is a {kind.__name__}, which cannot lose entries; leave out "
        "cache_implementation (write 'quant:8' into the cache spec for fewer bits), or pass "
        "DynamicCache(config=model.config)"
    )


def nbytes(layer: Any) -> int:
    """Bytes of the keys and values that a cache layer holds, one of transformers included."""
    if getattr(layer, "in_packs", False):
        return int(layer.nbytes)
    return int(layer.keys.nbytes + layer.values.nbytes)
