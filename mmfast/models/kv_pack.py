"""One conversation's keys and values of one layer, most of them in few bits.

A `Row` is what a cache layer holds of one batch row: packs, then the recent entries in full
precision, which lie with those of the other rows on the layer. Nothing is ever packed twice: an
entry that a policy evicts from a pack is passed over when the pack is read, and a pack goes when
none of its entries is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.ops.dequantise_row import dequantise_row
from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.mixed_bits import MixedPacked, unpack_mixed
from mmfast.ops.quantise import Packed, dequantise


@dataclass(frozen=True, eq=False)
class Pack:
    """Consecutive entries in few bits.

    Attributes:
        keys: `[H, n, d]`.
        values: `[H, n, d]`.
        n: Entries per head.
    """

    keys: Packed | MixedPacked
    values: Packed | MixedPacked
    n: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.keys.nbytes + self.values.nbytes


@dataclass(frozen=True, eq=False)
class Row:
    """What one batch row holds beside its recent entries.

    Attributes:
        packs: In order of time.
        live: `[H, m]` ascending: which entries of packs and recent ones are left, as of the time
            when there were `covered` of them; None where all are.
        covered: See `live`; what came since is left.
    """

    packs: tuple[Pack, ...] = ()
    live: Tensor | None = None
    covered: int = 0

    @property
    def packed(self) -> int:
        """Entries per head in packs, evicted ones too."""
        return sum(pack.n for pack in self.packs)

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
        packs, index = self.packs, self.index(keys.shape[1])
        if packs:
            keys = _behind([p.keys for p in packs], self.packed, keys)
            values = _behind([p.values for p in packs], self.packed, values)
        if index is None:
            return keys, values
        index = index.to(keys.device)
        return gather_rows(keys, index), gather_rows(values, index)

    def index(self, recent: int) -> Tensor | None:
        """`live` with what came since, `[H, m]`."""
        if self.live is None:
            return None
        more = torch.arange(self.covered, self.packed + recent, device=self.live.device)
        return torch.cat([self.live.long(), more.expand(len(self.live), -1)], 1)

    def keep(self, kept: Tensor, recent: int) -> Row:
        """Only these of the entries that are left, `[H, m]` ascending."""
        index, total = self.index(recent), self.packed + recent
        live = kept if index is None else index.gather(1, kept)
        return replace(self, live=live.to(torch.int32), covered=total)._without_empty_packs()

    def without_last(self, count: int, recent: int) -> Row:
        """When `count` recent entries, which nothing evicted, were taken back; `recent` is left."""
        total = self.packed + recent
        if self.live is None or self.covered <= total:
            return self
        return replace(
            self, live=self.live[:, : self.live.shape[1] - self.covered + total], covered=total
        )

    def _without_empty_packs(self) -> Row:
        assert self.live is not None
        packs, live, covered, start = list[Pack](), self.live, self.covered, 0
        for pack in self.packs:
            inside = (live >= start) & (live < start + pack.n)
            if bool(inside.any()):
                packs.append(pack)
                start += pack.n
            else:
                live = torch.where(live >= start, live - pack.n, live)
                covered -= pack.n
        return Row(tuple(packs), live, covered)


def _behind(packs: Sequence[Packed | MixedPacked], n: int, recent: Tensor) -> Tensor:
    """Packs of n entries unpacked, and the recent ones `[H, r, d]` behind: `[H, n + r, d]`."""
    plain = [pack for pack in packs if isinstance(pack, Packed)]
    if len(plain) < len(packs):
        parts = [unpack_mixed(p) if isinstance(p, MixedPacked) else dequantise(p) for p in packs]
        return torch.cat([*parts, recent], 1)
    row = recent.new_empty(len(recent), n + recent.shape[1], recent.shape[2])
    dequantise_row(plain, row[:, :n])
    row[:, n:] = recent
    return row


# `(x [H, n, d], whether keys) -> ` the same in few bits.
Packer = Callable[[Tensor, bool], Any]


def packs_of(keys: Tensor, values: Tensor, pack: Packer, size: int | None) -> list[Pack]:
    """Packs of at most `size` entries, or one of all."""
    pairs = zip(_packed(keys, pack, True, size), _packed(values, pack, False, size), strict=True)
    left, size = keys.shape[1], size or keys.shape[1]
    return [
        Pack(k, v, min(size, left - start))
        for (k, v), start in zip(pairs, range(0, left, size), strict=True)
    ]


def _packed(x: Tensor, pack: Packer, keys: bool, size: int | None) -> list[Any]:
    """Parts of `size` entries, all full ones at once."""
    full = 0 if size is None else x.shape[1] // size
    if size is None or full < 2:
        return [pack(part.contiguous(), keys) for part in x.split(size or x.shape[1], 1)]
    parts: list[Any] = pack(x[:, : full * size].unflatten(1, (full, size)), keys).apart()
    rest = x[:, full * size :]
    return [*parts, pack(rest.contiguous(), keys)] if rest.shape[1] else parts
