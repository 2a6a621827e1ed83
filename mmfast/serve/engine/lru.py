"""Results by key, bounded by bytes: the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Lru(Generic[T]):
    """A dictionary that forgets.

    Args:
        limit: Bytes; 0 keeps nothing.
        size: Bytes of a value.

    Attributes:
        nbytes: Bytes of what is held.
        hits: How often something was found.
        misses: How often nothing was.
    """

    def __init__(self, limit: int, size: Callable[[T], int]) -> None:
        self.limit, self._size = limit, size
        self._held: OrderedDict[Hashable, T] = OrderedDict()
        self.nbytes = self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._held)

    def get(self, key: Hashable) -> T | None:
        """The value, now the most recently used; None where there is none."""
        found = self._held.get(key)
        if found is None:
            self.misses += 1
            return None
        self.hits += 1
        self._held.move_to_end(key)
        return found

    def put(self, key: Hashable, value: T) -> list[tuple[Hashable, T]]:
        """Keep a value where it fits; returns what had to go."""
        gone = self.drop(key)
        if self._size(value) > self.limit:
            return gone
        self._held[key] = value
        self.nbytes += self._size(value)
        return gone + self.shrink(self.limit)

    def drop(self, key: Hashable) -> list[tuple[Hashable, T]]:
        """Forget one."""
        if key not in self._held:
            return []
        value = self._held.pop(key)
        self.nbytes -= self._size(value)
        return [(key, value)]

    def shrink(self, limit: int) -> list[tuple[Hashable, T]]:
        """Forget the oldest until no more than `limit` bytes are held; returns what went."""
        gone = []
        while self.nbytes > limit:
            gone += self.drop(next(iter(self._held)))
        return gone
