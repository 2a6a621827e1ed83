"""Stored blocks, and quotas of bytes and blocks per tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.kv import Block
from mmfast.core.size import parse_bytes
from mmfast.ops.quantisation import PackedTensor, Quantiser, dequantise
from mmfast.streams.archive.files import compact, value

TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class TierQuotas:
    """Bytes per tier; 0 leaves a tier out, None sets no limit.

    `device` is beside the model, read without a copy over the bus; `host` in main memory, with
    `blocks` at most, however small they are; `disk` in files, in a folder of its own in `folder`.
    """

    device: int | None = 0
    host: int | None = 10**9
    disk: int | None = 0
    folder: Path | None = None
    blocks: int | None = None

    @classmethod
    def of(
        cls,
        device: str | int | None = 0,
        host: str | int | None = "1GB",
        disk: str | int | None = 0,
        folder: str | Path | None = None,
        blocks: int | None = None,
    ) -> TierQuotas:
        """Quotas from sizes as people write them; MmfastError where they make no sense."""
        if blocks is not None and (type(blocks) is not int or blocks < 1):
            raise MmfastError(f"{blocks!r} is no number of blocks; give 1 or more, or None")
        on_disk = parse_bytes(disk)
        if on_disk != 0 and folder is None:
            raise MmfastError(f"a disk quota of {disk!r} needs a folder; name one, or drop it")
        where = None if folder is None else Path(folder)
        return cls(parse_bytes(device), parse_bytes(host), on_disk, where, blocks)

    def limit(self, tier: str) -> float:
        """Bytes that a tier may hold."""
        size: int | None = getattr(self, tier)
        return float("inf") if size is None else size

    def full(self, tier: str, blocks: int, used: int) -> bool:
        """Tell whether a number of blocks of `used` bytes in all exceeds a tier."""
        most = self.blocks if tier == "host" else None
        return used > self.limit(tier) or (most is not None and blocks > most)


State = Tensor | PackedTensor
value(PackedTensor)


@value
@dataclass(frozen=True, eq=False)
class StoredLayer:
    """Keys (before RoPE) and values `[H, n_l, d]` of one layer of a block.

    `kept` `[n_l]` tells which tokens of the block they are, None for all.
    """

    keys: State
    values: State
    kept: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and places."""
        return sum(_nbytes(part) for part in (self.keys, self.values, self.kept))

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Keys and values as numbers `[H, n_l, d]`."""
        keys, values = (
            dequantise(part) if isinstance(part, PackedTensor) else part
            for part in (self.keys, self.values)
        )
        return keys, values


@value
@dataclass(frozen=True, eq=False)
class Shared:
    """Properties that all layers of a block share; see `Block`."""

    kind: str
    time: float | None
    relative: Tensor
    advance: Tensor


@dataclass(frozen=True, eq=False)
class Stored:
    """A block of an archive."""

    number: int
    shared: Shared
    layers: tuple[StoredLayer, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that count against a quota."""
        places = _nbytes(self.shared.relative) + _nbytes(self.shared.advance)
        return places + sum(layer.nbytes for layer in self.layers)

    @classmethod
    def of(cls, block: Block) -> Stored:
        """The block in storage of its own, on the device it is on."""
        kept = block.kept or (None,) * len(block.keys)
        layers = tuple(
            StoredLayer(compact(k), compact(v), None if t is None else compact(t.cpu()))
            for k, v, t in zip(block.keys, block.values, kept, strict=True)
        )
        relative, advance = compact(block.relative.cpu()), compact(block.advance.cpu())
        return cls(block.number, Shared(block.kind, block.time, relative, advance), layers)

    def packed(self, store: Quantiser | None) -> Stored:
        """In fewer bits; as it is where it is already, has no tokens or no finite numbers."""
        if store is None:
            return self
        return self._each(
            lambda layer: StoredLayer(
                _pack(layer.keys, store, keys=True), _pack(layer.values, store), layer.kept
            )
        )

    def to(self, device: torch.device) -> Stored:
        """On another device."""
        return self._each(
            lambda layer: StoredLayer(
                _to(layer.keys, device), _to(layer.values, device), layer.kept
            )
        )

    def _each(self, change: Callable[[StoredLayer], StoredLayer]) -> Stored:
        return Stored(self.number, self.shared, tuple(change(layer) for layer in self.layers))

    def tree(self) -> list[Any]:
        """Return the parts that a file keeps apart: number, shared part, layers."""
        return [self.number, self.shared, *self.layers]

    @classmethod
    def from_tree(cls, tree: list[Any]) -> Stored:
        """Return the block of a `tree`."""
        return cls(tree[0], tree[1], tuple(tree[2:]))


def _nbytes(part: State | None) -> int:
    return 0 if part is None else part.nbytes


def _pack(part: State, store: Quantiser, *, keys: bool = False) -> State:
    if isinstance(part, PackedTensor) or not part.numel():
        return part
    try:
        return store.pack(part, keys=keys)
    except MmfastError:  # not finite: kept as it is, so that it shows where it is read
        return part


def _to(part: State, device: torch.device) -> State:
    if isinstance(part, Tensor):
        return part.to(device)
    codes, low, step = (x.to(device) for x in (part.codes, part.low, part.step))
    return replace(part, codes=codes, low=low, step=step)
