"""Blocks as an archive stores them, and quotas of bytes and blocks per tier."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.core.kv import KVBlock, Numbers
from mmfast.core.trace import parse_bytes
from mmfast.ops.quantisation import PackedTensor, Quantiser
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


value(PackedTensor)
value(KVBlock)


def stored(block: KVBlock) -> KVBlock:
    """The block in storage of its own, keys and values on the device they are on."""
    return replace(
        block.each(lambda part, _: compact(part)),
        relative=compact(block.relative.cpu()),
        advance=compact(block.advance.cpu()),
        kept=tuple(None if kept is None else compact(kept.cpu()) for kept in block.kept),
    )


def stored_bytes(block: KVBlock) -> int:
    """Bytes of keys, values and places, which count against a quota."""
    kept = sum(each.nbytes for each in block.kept if each is not None)
    return block.nbytes + kept + block.relative.nbytes + block.advance.nbytes


def packed(block: KVBlock, store: Quantiser | None) -> KVBlock:
    """In fewer bits; as it is where it is already, has no tokens or no finite numbers."""
    return block if store is None else block.each(partial(_pack, store))


def _pack(store: Quantiser, part: Numbers, keys: bool) -> Numbers:
    if isinstance(part, PackedTensor) or not part.numel():
        return part
    try:
        return store.pack(part, keys=keys)
    except MmfastError:  # not finite: kept as it is, so that it shows where it is read
        return part


def parts_of(block: KVBlock) -> list[Any]:
    """Return what a file keeps apart: the number, what all layers share, and each layer."""
    kept = block.kept or (None,) * len(block.keys)
    shared = replace(block, keys=(), values=(), kept=())
    return [block.number, shared, *zip(block.keys, block.values, kept, strict=True)]


def block_of(number: int, shared: KVBlock, *layers: Any) -> KVBlock:
    """Return the block of such parts, with some layers or all."""
    keys, values, kept = zip(*layers, strict=True)
    return replace(shared, number=number, keys=keys, values=values, kept=kept)
