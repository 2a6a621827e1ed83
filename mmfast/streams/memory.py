"""What a stream remembers: live tokens in buffers, and the archive of what left them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.core.kv import Block
from mmfast.streams import saved
from mmfast.streams.archive import Found, Part
from mmfast.streams.buffers import Buffer, Span
from mmfast.streams.leaving import budget, check_plan, cut, leaving, spans, staying
from mmfast.streams.places import Cursor, Live, Start, walk
from mmfast.streams.turning import Turner


class Store(Protocol):
    """What a memory asks of an archive; see `streams.archive.Archive`."""

    def put(self, block: Block) -> None:
        """Add the newest block."""

    def choose(self, layer: int, query: Tensor) -> list[Found]:
        """What to read in a layer for queries `[Hq, T, d]` before RoPE."""

    def read(self, layer: int, found: Sequence[Found]) -> list[Part]:
        """Read it."""

    def forget(self, number: int) -> None:
        """Forget a block."""

    def numbers(self) -> list[int]:
        """Numbers of the stored blocks."""

    def stats(self) -> dict[str, Any]:
        """Figures."""

    def snapshot(self) -> Any:
        """All state as a tree."""

    def restore(self, tree: Any) -> None:
        """Take over a snapshot."""


class Memory:
    """Live tokens of one stream within the budget of its plan; made by `Engine.memory`.

    Positions are those of a prompt made of the live blocks. When blocks leave, those behind them
    stay where they are until the hole is larger than `slack` of that prompt; then all that is
    behind it is rotated anew from the keys before RoPE, so that no error can add up.

    Attributes:
        plan: What stays; None keeps everything.
        archive: Where blocks go that leave; None drops them.
        blocks: Live blocks in the order of time.
        cursor: The end of the stream.
        buffers: Per layer their keys and values.
        lock: Held while the memory changes.
    """

    def __init__(
        self, turner: Turner, plan: CachePlan | None, archive: Store | None, slack: float
    ) -> None:
        check_plan(plan)
        self.plan = plan
        self.archive = archive
        self.slack = slack
        self.turner = turner
        self.lock = threading.RLock()
        self.blocks: list[Live] = []
        self.cursor = Cursor.behind([], turner.axes)
        room = budget(plan)
        self.buffers = [Buffer(room, bounded=room > 0) for _ in range(turner.layers)]
        self.number = 0  # of the next block
        self.stored = -1  # newest number in the archive
        self._known: dict[tuple[bytes, ...], list[int]] = {}
        self.counts = {"evicted_blocks": 0, "evicted_tokens": 0, "rebases": 0}

    @property
    def next_start(self) -> Start:
        """Where the next piece starts on each axis, unless it is fresh."""
        return self.cursor.next

    def admit(self, block: Live) -> None:
        """Count in a block whose tokens stand behind the last ones, and let others leave.

        Nothing has changed when this raises.

        Raises:
            MmfastError: The block does not fit, or the archive refuses what leaves.
        """
        if self.plan is None or not self.plan.position:
            return self._add(block)
        blocks = [*self.blocks, block]
        stays = staying(self.plan, blocks, self._known)
        gone = [(old, size) for old, size in zip(blocks, stays, strict=True) if size < old.size]
        if gone and self.archive is not None:
            self._put(leaving(blocks, stays, self.buffers))
        self.number = max(self.number, block.number + 1)
        uneven, left = not all(old.even for old in blocks), list[Span]()
        for layer, buffer in enumerate(self.buffers):
            buffer.length += block.size_at(layer)
            if gone:
                left = spans(blocks, stays, layer) if uneven or not layer else left
                buffer.keep(left)
        self.blocks = [cut(old, size) for old, size in zip(blocks, stays, strict=True) if size > 0]
        self.cursor.place(block)
        if gone:
            self.counts["evicted_blocks"] += sum(size == 0 for _, size in gone)
            self.counts["evicted_tokens"] += sum(old.size - size for old, size in gone)
            self._close_up()
            self.cursor = Cursor.behind(self.blocks, self.turner.axes)

    def _add(self, block: Live) -> None:
        """Count in a block where nothing ever leaves."""
        self.number = max(self.number, block.number + 1)
        for layer, buffer in enumerate(self.buffers):
            buffer.length += block.size_at(layer)
        self.blocks.append(block)
        self.cursor.place(block)

    def _put(self, blocks: Sequence[Block]) -> None:
        """Archive blocks, all or none."""
        assert self.archive is not None
        done = []
        try:
            for block in blocks:
                # Text may outlive frames that came after it; the archive counts upwards.
                self.stored = max(self.stored + 1, block.number)
                self.archive.put(replace(block, number=self.stored))
                done.append(self.stored)
        except BaseException:
            for number in done:
                self.archive.forget(number)
            raise

    def _close_up(self) -> None:
        """Rotate anew what stands too far behind the blocks before it."""
        tight = walk(self.blocks, self.turner.axes)
        if not tight:
            return
        last = self.blocks[-1]
        gap = max(abs(a - b) for a, b in zip(last.start, tight[-1], strict=True))
        if gap > self.slack * (last.top(tight[-1]) + 1):
            self.blocks = self.turner.move(self.buffers, self.blocks, tight)
            self.counts["rebases"] += 1

    def tokens(self) -> int:
        """Live tokens, in the layer that holds most."""
        return max(buffer.length for buffer in self.buffers)

    def stats(self) -> dict[str, Any]:
        """Figures: live tokens, blocks, bytes, evictions, re-bases, positions, the archive's."""
        with self.lock:
            figures: dict[str, Any] = {
                "live_tokens": self.tokens(),
                "live_blocks": len(self.blocks),
                "blocks": self.number,
                "bytes": sum(buffer.nbytes for buffer in self.buffers),
                "position": max(self.next_start),
                **self.counts,
            }
            if self.archive is not None:
                figures["archive"] = self.archive.stats()
            return figures

    def snapshot(self) -> dict[str, Any]:
        """All state as a tree of tensors, numbers and strings; see `streams.saved`."""
        with self.lock, torch.no_grad():
            return saved.to_tree(self)

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot of a stream of the same model and plan; it goes on bit for bit.

        Raises:
            MmfastError: The snapshot is of another model or plan.
        """
        with self.lock, torch.no_grad():
            saved.from_tree(self, tree)
