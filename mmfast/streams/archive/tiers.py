"""Stored blocks on three tiers: beside the model, in main memory, on disk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mmfast.ops.quantisation import Quantiser
from mmfast.streams.archive.blocks import Shared, Stored, StoredLayer, TierQuotas
from mmfast.streams.archive.disk import DiskTier, Reports, give_back

CPU = torch.device("cpu")
_TIDY = 64  # blocks that leave main memory between two times of giving back what they left


class Tiers:
    """Blocks within quotas.

    A block that finds its tier full pushes that tier's oldest down to the next one, and what
    leaves the last tier is dropped. Age decides, not use: reading a block for a question must not
    change what the stream remembers afterwards.
    """

    def __init__(
        self,
        quotas: TierQuotas,
        store: Quantiser | None,
        reports: Reports,
        lose: Callable[[int], None],
    ) -> None:
        self._quotas = quotas
        self._store = store
        self._reports = reports
        self._lose = lose
        self._memory: dict[str, OrderedDict[int, Stored]] = {
            "device": OrderedDict(),
            "host": OrderedDict(),
        }
        self._used = {"device": 0, "host": 0}
        self._left = 0  # blocks that left main memory
        self.disk = DiskTier(quotas, reports, lose)

    def __len__(self) -> int:
        return len(self.disk.sizes) + sum(map(len, self._memory.values()))

    def __iter__(self) -> Iterator[int]:
        yield from self.disk.sizes
        yield from self._memory["host"]
        yield from self._memory["device"]

    def __contains__(self, number: int) -> bool:
        return number in self.disk.sizes or any(number in tier for tier in self._memory.values())

    @property
    def blocks(self) -> dict[str, int]:
        """Blocks per tier."""
        return {**{t: len(held) for t, held in self._memory.items()}, "disk": len(self.disk.sizes)}

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes per tier."""
        return {**self._used, "disk": self.disk.nbytes}

    def put(self, stored: Stored, tier: str = "device") -> None:
        """Add the newest block."""
        if tier == "device" and not self._fits(stored, tier):
            tier = "host"
        if tier == "host":
            stored = stored.packed(self._store).to(CPU)
            tier = tier if self._fits(stored, tier) else "disk"
        if tier == "disk":
            if not self.disk.put(stored):
                self._drop(stored.number)
            return
        self._memory[tier][stored.number] = stored
        self._used[tier] += stored.nbytes
        self._settle(tier)

    def _fits(self, stored: Stored, tier: str) -> bool:
        """Whether a tier could hold the block if it were empty."""
        return stored.nbytes <= self._quotas.limit(tier)

    def _settle(self, tier: str) -> None:
        held = self._memory[tier]
        while self._quotas.full(tier, len(held), self._used[tier]):
            number = next(iter(held))
            self._left += tier == "host"
            self.put(self._take(number, tier), "host" if tier == "device" else "disk")
        if self._left >= _TIDY:
            self._left = 0
            give_back()

    def _take(self, number: int, tier: str) -> Stored:
        stored = self._memory[tier].pop(number)
        self._used[tier] -= stored.nbytes
        return stored

    def _drop(self, number: int) -> None:
        self._reports.once("dropped", f"memory full: block {number} dropped, as all that follow")
        self._lose(number)

    def read(self, number: int, layer: int) -> tuple[Shared, StoredLayer] | None:
        """One layer of a block; None where it is not, or no longer, there."""
        for tier in self._memory.values():
            if number in tier:
                return tier[number].shared, tier[number].layers[layer]
        return self.disk.read(number, layer) if number in self.disk.sizes else None

    def remove(self, number: int) -> None:
        """Forget a block, if it is there."""
        for name, tier in self._memory.items():
            if number in tier:
                self._take(number, name)
        if number in self.disk.sizes:
            self.disk.remove(number)

    def snapshot(self) -> dict[str, Any]:
        """Plain data, and the files of the disk tier."""
        rows = {
            name: [{"number": s.number, "sections": s.sections()} for s in tier.values()]
            for name, tier in self._memory.items()
        }
        return {**rows, "disk": self.disk.snapshot()}

    def restore(self, tree: dict[str, Any], device: torch.device) -> None:
        """Take over a snapshot, the oldest first; what exceeds the quotas moves down."""
        for row in tree["disk"]:
            if not self.disk.adopt(row["number"], row["nbytes"], row["file"]):
                self._drop(row["number"])
        for tier, where in (("host", CPU), ("device", device)):
            for row in tree[tier]:
                self.put(Stored.restore(row["number"], row["sections"]).to(where), tier)

    def close(self) -> None:
        """Let go of all blocks and files."""
        for tier in self._memory:
            self._memory[tier].clear()
            self._used[tier] = 0
        self.disk.close()
