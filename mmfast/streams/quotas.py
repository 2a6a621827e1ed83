"""How many bytes of stored blocks, and how many of them, may lie where."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mmfast.core.errors import MmfastError

TIERS = ("device", "host", "disk")
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": 1024**i for i, p in enumerate("KMGT", 1)}


def parse_bytes(size: str | int | None) -> int | None:
    """Read a size such as `"2GB"`, `"500 MB"`, `"1.5GiB"`, 4096; None is no limit.

    Raises:
        MmfastError: It is no size, or negative.
    """
    if size is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = None if match is None else _UNITS.get(match[2].upper())
    if match is None or unit is None or isinstance(size, bool):
        raise MmfastError(f"{size!r} is no size; write bytes, '500MB', '2GB' or '1.5GiB'")
    whole = match[1].isdecimal()
    return int(match[1]) * unit if whole else round(float(match[1]) * unit)


@dataclass(frozen=True)
class Quotas:
    """Bytes per tier; 0 leaves a tier out, None sets no limit.

    Attributes:
        device: Beside the model, read without a copy over the bus.
        host: In main memory.
        disk: In files in `folder`.
        folder: Where the disk tier makes a folder of its own.
        blocks: Most blocks in main memory, however small they are; None sets no limit.
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
    ) -> Quotas:
        """Quotas from sizes as people write them.

        Raises:
            MmfastError: A wrong size or number, or a disk quota without a folder.
        """
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
        """Whether so many blocks of together `used` bytes are too much for a tier."""
        most = self.blocks if tier == "host" else None
        return used > self.limit(tier) or (most is not None and blocks > most)
