"""Keys and values of the beginnings of prompts, for later prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmfast.core.kv import KVBlock
from mmfast.serve.engine.encoder import BLOCK
from mmfast.serve.engine.kv.byte_cache import ByteCache

_Name = tuple[str, bytes]


@dataclass(frozen=True, eq=False)
class _Entry:
    kv: KVBlock  # [H, m, d] per layer
    names: tuple[_Name, ...]


class Prefixes:
    """A cache of the keys and values of prompts, of bounded bytes, found by their prefixes.

    A name holds the tenant and a hash of the content and position of every token up to the end of a
    block: two prompts share their common prefix, and no tenant meets the prompts of another.
    """

    def __init__(self, limit: int) -> None:
        self.held: ByteCache[_Entry] = ByteCache(limit, lambda entry: entry.kv.nbytes, self._forget)
        self._where: dict[_Name, list[_Name]] = {}  # entries with this prefix, the newest last

    def find(
        self, tenant: str, blocks: Sequence[bytes], length: int, rest: int = 1
    ) -> tuple[KVBlock, int] | None:
        """Return the longest known prefix: keys and values, and its number of tokens.

        The last `rest` tokens of the prompt must be read.
        """
        for count in range(reusable(length, rest) // BLOCK, 0, -1):
            for place in reversed(self._where.get((tenant, blocks[count - 1]), ())):
                if (entry := self.held.get(place)) is not None:
                    return entry.kv, count * BLOCK
        self.held.misses += 1
        return None

    def put(self, tenant: str, blocks: Sequence[bytes], kv: KVBlock) -> None:
        """Keep the keys and values of a prompt; they must not change afterwards."""
        names = tuple((tenant, block) for block in blocks)
        entry = _Entry(kv, names)
        if not names or names[-1] in self._where or kv.nbytes > self.held.maxsize:
            return
        for name in names[:-1]:  # a prompt that is a prefix of this one would be held twice
            self.held.pop(name, None)
        for name in names:
            self._where.setdefault(name, []).append(names[-1])
        self.held.put(names[-1], entry)

    def shrink(self, limit: int) -> None:
        """Drop the oldest entries until no more than `limit` bytes are held."""
        self.held.shrink(max(0, limit))

    def _forget(self, key: object, entry: _Entry) -> None:
        for name in entry.names:
            self._where[name] = [each for each in self._where[name] if each != key]
            if not self._where[name]:
                del self._where[name]


def reusable(length: int, rest: int = 1) -> int:
    """Return the tokens of a prompt that a prefix may cover; its last `rest` must be read."""
    return max(0, length - max(1, rest)) // BLOCK * BLOCK
