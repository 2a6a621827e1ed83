"""A cache of bounded bytes for what requests share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from cachetools import LRUCache

T = TypeVar("T")


class ByteCache(LRUCache[Hashable, T]):
    """A cache of bounded bytes that drops the least recently used values.

    A limit of 0 keeps nothing; `dropped` is called with key and value of each entry that goes.
    """

    def __init__(
        self,
        limit: int,
        size: Callable[[T], int],
        dropped: Callable[[Hashable, T], None] = lambda key, value: None,
    ) -> None:
        super().__init__(limit, getsizeof=size)
        self._dropped, self.hits, self.misses = dropped, 0, 0

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return int(self.currsize)

    def get(  # type: ignore[override]
        self, key: Hashable, default: T | None = None
    ) -> T | None:
        """Return the value, now the most recently used; `default` where there is none."""
        if key not in self:
            self.misses += 1
            return default
        self.hits += 1
        return self[key]

    def put(self, key: Hashable, value: T) -> None:
        """Keep a value where it fits; an older value of the key goes in any case."""
        self.pop(key, None)
        if self.getsizeof(value) <= self.maxsize:
            self[key] = value

    def shrink(self, limit: int) -> None:
        """Drop the oldest values until no more than `limit` bytes are held."""
        while self.currsize > limit:
            self.popitem()

    def __delitem__(self, key: Hashable) -> None:
        value = self[key]
        super().__delitem__(key)
        self._dropped(key, value)
