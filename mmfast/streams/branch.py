"""A question on a stream: a copy of the live tokens that may read stored ones again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.models.raw import Raw
from mmfast.streams.buffers import RAW, VALUES
from mmfast.streams.memory import Memory
from mmfast.streams.piece import Piece
from mmfast.streams.places import Live, highest, live
from mmfast.streams.recall import recall

if TYPE_CHECKING:
    from mmfast.streams.engine import Engine

_ROOM = 512  # tokens of a question, what is read for it and an answer, before a buffer grows


class Branch:
    """The live tokens of a stream at one moment, with a question and an answer behind them.

    Attributes:
        blocks: Blocks that stood when it was made, and its own.
        found: Per layer the archive's numbers of the blocks that were read for the question.
    """

    def __init__(self, engine: Engine, memory: Memory) -> None:
        self._engine = engine
        self._memory = memory
        self._shared = len(memory.blocks)
        self._newest = memory.stored  # what is archived later is live here
        self._kept = 0
        self._spots: list[list[int]] = []  # where each block of its own is, per layer
        self._token: Live | None = None  # the answer so far, where one is being written
        self._broken = False
        self.blocks = list(memory.blocks)
        self._cursor = replace(memory.cursor)
        self.buffers = [buffer.fork(_ROOM) for buffer in memory.buffers]
        self.found: dict[int, list[int]] = {}

    def extend(self, piece: Piece, *, retrieve: bool = True) -> Tensor:
        """Prefill a piece behind the branch.

        Args:
            piece: The question, or more of the conversation.
            retrieve: Read stored blocks for it; only the first time that there are any.

        Returns:
            Logits `[V]`, float32, of its last token.

        Raises:
            MmfastError: The piece is malformed, or the branch failed before.
        """
        self._token = None
        with torch.no_grad():
            return self._run(piece, retrieve)

    def token(self, token: int) -> Tensor:
        """Write one token of the answer.

        Returns:
            Logits `[V]`, float32, of the next one.
        """
        ids = torch.tensor([token])
        axes = self._engine.turner.axes
        with torch.no_grad():
            piece = Piece(
                self._engine.embed(ids),
                torch.zeros(axes, 1, dtype=torch.int64),
                torch.ones(axes, dtype=torch.int64),
                "text",
                fresh=not self._own or self._own[-1].kind == "frame",
                ids=ids,
            )
            logits = self._run(piece, False)
            self._join()
        return logits

    def keep(self) -> None:
        """Append what was said on this branch to the stream, at its present end.

        What stands there was computed with everything that the branch could see. A second call
        appends what came since the first.

        Raises:
            MmfastError: A block does not fit into the memory; those before it are kept.
        """
        memory = self._memory
        with memory.lock, torch.no_grad():
            own = list(zip(self._own, self._spots, strict=True))
            for block, spots in own[self._kept :]:
                placed = replace(block, number=memory.number, start=memory.cursor.start(block))
                for layer, (buffer, at) in enumerate(zip(self.buffers, spots, strict=True)):
                    raw, values = (buffer.read(p, at, at + block.n) for p in (RAW, VALUES))
                    turned = memory.turner.rotate(layer, raw, placed.positions(layer))
                    memory.buffers[layer].write(raw, turned, values)
                memory.admit(placed)
                self._kept += 1
            self._token = None

    @property
    def _own(self) -> list[Live]:
        return self.blocks[self._shared :]

    def _run(self, piece: Piece, retrieve: bool) -> Tensor:
        if self._broken:
            raise MmfastError("this branch failed in the middle of a step; open another one")
        block = live(piece, -1, self._cursor.start(piece))
        reading = retrieve and not self.found and self._stored()
        before = partial(self._before, block) if reading else None
        lengths = [buffer.length for buffer in self.buffers]
        try:
            hidden = self._engine._forward(piece, block.start, self.buffers, before)
        except BaseException:
            self._broken = [buffer.length for buffer in self.buffers] != lengths
            raise
        self._spots.append([buffer.length for buffer in self.buffers])
        for buffer in self.buffers:
            buffer.length += block.n
        self.blocks.append(block)
        self._cursor.place(block)
        return self._engine.logits(hidden)

    def _stored(self) -> bool:
        archive = self._memory.archive
        if archive is None:
            return False
        with self._memory.lock:
            return any(number <= self._newest for number in archive.numbers())

    def _before(self, block: Live, raw: Raw) -> Callable[[int], None]:
        """What a layer does before it attends: read what the question asks for."""

        def read(layer: int) -> None:
            archive = self._memory.archive
            assert archive is not None
            with self._memory.lock:
                found = archive.choose(layer, raw.queries[layer][0])
                found = [each for each in found if each.number <= self._newest]
                parts = archive.read(layer, found)
            self.found[layer] = [part.number for part in parts]
            if parts:
                recall(self._engine.turner, layer, self.buffers[layer], self.blocks, parts, block)

        return read

    def _join(self) -> None:
        """Count tokens of one answer as one block."""
        last = self.blocks[-1]
        if self._token is None:
            self._token = last
            return
        head = self._token
        offset = torch.tensor(last.start) - torch.tensor(head.start)
        relative = torch.cat([head.relative, last.relative + offset[:, None]], 1)
        advance = tuple(int(o) + a for o, a in zip(offset, last.advance, strict=True))
        kinds = torch.cat([head.kinds, last.kinds])
        top = highest(relative, advance)
        self._token = replace(head, relative=relative, advance=advance, highest=top, kinds=kinds)
        self.blocks[-2:] = [self._token]
        self._spots.pop()
