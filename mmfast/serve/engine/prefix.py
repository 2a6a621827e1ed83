"""Beginnings of prompts whose keys and values are there already, per tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmfast.serve.engine.embed import BLOCK
from mmfast.serve.engine.lru import Lru
from mmfast.serve.engine.prefill import reusable


@dataclass(frozen=True, eq=False)
class _Entry:
    kv: tuple[Tensor, ...]  # [2, H, m, d] per layer
    names: tuple[tuple[str, bytes], ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.kv)


class Prefixes:
    """Keys and values by what the tokens before and at their end are.

    A name holds the tenant and a hash of every token, its content and its position up to there:
    two prompts share what they begin alike with, and no tenant ever meets another's.

    Args:
        limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.held: Lru[_Entry] = Lru(limit, lambda entry: entry.nbytes)
        self._where: dict[tuple[str, bytes], tuple[str, bytes]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return self.held.nbytes

    def find(
        self, tenant: str, blocks: Sequence[bytes], length: int
    ) -> tuple[tuple[Tensor, ...], int] | None:
        """The longest known beginning of a prompt: keys and values, and how many tokens count."""
        for count in range(reusable(length) // BLOCK, 0, -1):
            place = self._where.get((tenant, blocks[count - 1]))
            entry = None if place is None else self.held.get(place)
            if entry is not None:
                return entry.kv, count * BLOCK
        self.held.misses += 1
        return None

    def put(self, tenant: str, blocks: Sequence[bytes], kv: Sequence[Tensor]) -> None:
        """Keep what a prompt left; it is not changed afterwards."""
        names = tuple((tenant, block) for block in blocks)
        if not names or names[-1] in self._where:
            return
        gone = self.held.put(names[-1], _Entry(tuple(kv), names))
        if self.held.limit >= sum(each.nbytes for each in kv):
            self._where |= dict.fromkeys(names, names[-1])
        self._forget(gone)

    def shrink(self, limit: int) -> None:
        """Keep no more than `limit` bytes."""
        self._forget(self.held.shrink(max(0, limit)))

    def _forget(self, gone: Sequence[tuple[object, _Entry]]) -> None:
        for key, entry in gone:
            for name in entry.names:
                if self._where.get(name) == key:
                    del self._where[name]
