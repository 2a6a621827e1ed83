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
            keys = torch.cat([*(unpack(p.keys) for p in packs), keys], 1)
            values = torch.cat([*(unpack(p.values) for p in packs), values], 1)
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


def unpack(packed: Any) -> Tensor:
    """Keys or values `[H, n, d]` of a pack."""
    return unpack_mixed(packed) if isinstance(packed, MixedPacked) else dequantise(packed)


# `(x [H, n, d], whether keys) -> ` the same in few bits.
Packer = Callable[[Tensor, bool], Any]


def packs_of(keys: Tensor, values: Tensor, pack: Packer, size: int | None) -> list[Pack]:
    """Packs of at most `size` entries, or one of all."""
    n = keys.shape[1]
    parts: Sequence[tuple[Tensor, Tensor]] = list(
        zip(keys.split(size or n, 1), values.split(size or n, 1), strict=True)
    )
    return [
        Pack(pack(k.contiguous(), True), pack(v.contiguous(), False), k.shape[1]) for k, v in parts
    ]
