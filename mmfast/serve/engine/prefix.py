"""Beginnings of prompts whose keys and values are there already, per tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmfast.serve.engine.embed import BLOCK
from mmfast.serve.engine.lru import Lru
from mmfast.serve.engine.prefill import reusable

_Name = tuple[str, bytes]


@dataclass(frozen=True, eq=False)
class _Entry:
    kv: tuple[Tensor, ...]  # [2, H, m, d] per layer
    names: tuple[_Name, ...]

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
        self._where: dict[_Name, list[_Name]] = {}  # entries that begin so, the newest last

    def find(
        self, tenant: str, blocks: Sequence[bytes], length: int
    ) -> tuple[tuple[Tensor, ...], int] | None:
        """The longest known beginning of a prompt: keys and values, and how many tokens count."""
        for count in range(reusable(length) // BLOCK, 0, -1):
            for place in reversed(self._where.get((tenant, blocks[count - 1]), ())):
                if (entry := self.held.get(place)) is not None:
                    return entry.kv, count * BLOCK
        self.held.misses += 1
        return None

    def put(self, tenant: str, blocks: Sequence[bytes], kv: Sequence[Tensor]) -> None:
        """Keep what a prompt left; it is not changed afterwards."""
        names = tuple((tenant, block) for block in blocks)
        entry = _Entry(tuple(kv), names)
        if not names or names[-1] in self._where or entry.nbytes > self.held.limit:
            return
        for name in names[:-1]:  # whose whole is a beginning of this one is held twice
            self._forget(self.held.drop(name))
        for name in names:
            self._where.setdefault(name, []).append(names[-1])
        self._forget(self.held.put(names[-1], entry))

    def shrink(self, limit: int) -> None:
        """Keep no more than `limit` bytes."""
        self._forget(self.held.shrink(max(0, limit)))

    def _forget(self, gone: Sequence[tuple[object, _Entry]]) -> None:
        for key, entry in gone:
            for name in entry.names:
                self._where[name] = [each for each in self._where[name] if each != key]
                if not self._where[name]:
                    del self._where[name]
