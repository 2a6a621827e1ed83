"""The archive of a stream: every block that left the window, found again and read by question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.kv import Block, Retriever
from mmfast.ops.quantise import Quantiser
from mmfast.streams.index import Found as Found
from mmfast.streams.index import LayerIndex
from mmfast.streams.quotas import Quotas
from mmfast.streams.reports import Reports
from mmfast.streams.stored import Stored
from mmfast.streams.tiers import Tiers

REPORTED = ("dropped", "corrupt", "lost", "disk_errors")


@dataclass(frozen=True, eq=False)
class Part:
    """Keys and values of one layer, read from a stored block.

    Attributes:
        number: Of the block.
        keys: `[H, m, d]` before RoPE.
        values: `[H, m, d]`.
        relative: `[A, m]` positions from the start of the block.
        advance: `[A]` from the start of the block to that of the next one.
    """

    number: int
    keys: Tensor
    values: Tensor
    relative: Tensor
    advance: Tensor


class Archive:
    """Stored blocks of one stream within byte quotas, with an index per layer to search them.

    The cost of adding a block does not depend on how many there are. Nothing here raises because
    a disk is full, gone or damaged: the blocks it takes along are dropped and reported.
    """

    def __init__(
        self,
        retriever: Retriever,
        layers: int,
        device: torch.device | str = "cpu",
        tiers: Quotas | None = None,
        store: Quantiser | None = None,
    ) -> None:
        """An empty archive.

        Args:
            retriever: Chooses what is read.
            layers: Of the language model.
            device: Where parts are wanted and the index lies.
            tiers: Byte quotas; None is `Quotas()`, main memory alone.
            store: Packs blocks that leave the device.
        """
        self.reports = Reports()
        self._retriever = retriever
        self._device = torch.device(device)
        self._index = [LayerIndex(self._device) for _ in range(layers)]
        self._gone: list[int] = []  # numbers that the tiers lost, until the index forgets them
        self._tiers = Tiers(tiers or Quotas(), store, self.reports, self._gone.append)
        self._newest = -1

    def put(self, block: Block) -> None:
        """Add the newest block; the oldest go where quotas are reached.

        Raises:
            MmfastError: It is not newer than all before, or has another number of layers.
        """
        if block.number <= self._newest or len(block.keys) != len(self._index):
            raise MmfastError(
                f"block {block.number} of {len(block.keys)} layers cannot follow block "
                f"{self._newest} in an archive of {len(self._index)} layers; put blocks in order"
            )
        stored = Stored.of(block)
        clusters = [self._retriever.represent(k) if k.shape[1] else None for k in block.keys]
        self._newest = block.number
        for index, found in zip(self._index, clusters, strict=True):
            if found is not None:
                index.add(block.number, found)
        self._tiers.put(stored)
        self._unindex()

    def choose(self, layer: int, query: Tensor) -> list[Found]:
        """What to read in a layer for the queries `[Hq, T, d]` (before RoPE) of a question."""
        return self._index[layer].choose(query, self._retriever)

    def read(self, layer: int, found: Sequence[Found]) -> list[Part]:
        """Read what was found, in the same order.

        Blocks that turn out damaged or gone are left out: they are dropped and reported.
        """
        parts = [self._part(layer, each) for each in found]
        self._unindex()
        return [part for part in parts if part is not None]

    def _part(self, layer: int, found: Found) -> Part | None:
        read = self._tiers.read(found.number, layer)
        if read is None:
            return None
        shared, held = read
        keys, values = held.unpacked()
        relative = shared.relative
        if held.kept is not None:
            relative = relative.index_select(-1, held.kept)
        if found.tokens is not None:
            tokens = found.tokens.to(keys.device)
            keys, values = keys.index_select(1, tokens), values.index_select(1, tokens)
            relative = relative.index_select(-1, found.tokens)
        moved = (x.to(self._device) for x in (keys, values, relative, shared.advance))
        return Part(found.number, *moved)

    def forget(self, number: int) -> None:
        """Forget a block, if it is there."""
        self._tiers.remove(number)
        self._gone.append(number)
        self._unindex()

    def _unindex(self) -> None:
        for number in self._gone:
            for index in self._index:
                index.drop(number)
        self._gone.clear()

    def numbers(self) -> list[int]:
        """Numbers of the stored blocks, ascending."""
        return sorted(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def nbytes(self) -> int:
        """Bytes of blocks and index together, on all tiers."""
        return sum(self._tiers.nbytes.values()) + self._index_bytes()

    def _index_bytes(self) -> int:
        return sum(index.nbytes for index in self._index)

    def stats(self) -> dict[str, Any]:
        """Blocks and bytes per tier, bytes of the index, what was dropped, corrupt or lost.

        `reports` has the latest of it in words.
        """
        return {
            "blocks": self._tiers.blocks,
            "bytes": self._tiers.nbytes,
            "index_bytes": self._index_bytes(),
            **{kind: self.reports.counts[kind] for kind in REPORTED},
            "reports": list(self.reports.lines),
        }

    def snapshot(self) -> dict[str, Any]:
        """All state; blocks on disk as files, which `saving.save` links or copies."""
        return {
            "newest": self._newest,
            "tiers": self._tiers.snapshot(),
            "index": [index.snapshot() for index in self._index],
            "reports": self.reports.snapshot(),
        }

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot of an archive with the same retriever; quotas may differ."""
        self._newest = tree["newest"]
        self.reports.restore(tree["reports"])
        for index, row in zip(self._index, tree["index"], strict=True):
            index.restore(row)
        self._tiers.restore(tree["tiers"], self._device)
        self._unindex()

    def close(self) -> None:
        """Let go of everything, files of the disk tier included."""
        self._gone += self.numbers()
        self._unindex()
        self._tiers.close()
