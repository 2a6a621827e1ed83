"""Part of a prompt that an early exit keeps, as its tokens pass by."""

from __future__ import annotations

import torch

from mmfast.core.kv import KVBlock
from mmfast.ops.stream_cache import RowBuffer
from mmfast.serve.engine.kv.bucket import Entries
from mmfast.serve.engine.kv.rows import AnswerRow
from mmfast.serve.engine.lane import Lane


class EarlyPrompt:
    """Keys and values of the adapter, of a prompt of `length` tokens from token `start` on."""

    def __init__(self, lane: Lane, start: int, length: int) -> None:
        self._lane, self._start, self._own = lane, start, RowBuffer(length - start)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._own.nbytes

    def keep(self, start: int, rows: slice) -> None:
        """Take in the tokens from `start` on, which were these rows of the last pass."""
        states, adapter = self._lane.early, self._lane.exit
        assert states is not None and adapter is not None
        at = start - self._start
        places = torch.arange(at, at + rows.stop - rows.start, device=states.device)
        _, keys, values = adapter.heads(states[:, rows], places)
        self._own.write(keys[0], values[0], at=at)

    def row(self, stop: int) -> AnswerRow:
        """Return them as a row, for as many more as its `most` will say."""
        keys, values = ((self._own.read(p, 0, stop - self._start),) for p in (0, 1))
        return AnswerRow([Entries(KVBlock(keys, values), 0)])
