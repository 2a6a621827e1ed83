"""Places of visitors: bounded in number, and free again when a visitor is idle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import mmfast

T = TypeVar("T", bound=Any)


class Seats(Generic[T]):
    """One object for each visitor, closed on leaving; `idle` seconds without use free a place."""

    def __init__(self, most: int = 8, idle: float = 300.0) -> None:
        self.most, self.idle = most, idle
        self._lock = threading.Condition()
        self._making: set[str] = set()
        self._taken: dict[str, tuple[T, float]] = {}

    def get(self, who: str) -> T | None:
        with self._lock:
            if who not in self._taken:
                return None
            thing = self._taken[who][0]
            self._taken[who] = thing, time.monotonic()
            return thing

    def take(self, who: str, make: Callable[[], T]) -> T:
        """The object of a visitor, made if there is none yet and a place is free."""
        thing = self.get(who)
        if thing is not None:
            return thing
        self._sweep()
        with self._lock:
            self._making.add(who)
        try:
            made = make()
            with self._lock:
                full = len(self._taken) >= self.most
                if not full:
                    self._taken[who] = made, time.monotonic()
        finally:
            with self._lock:
                self._making.discard(who)
                self._lock.notify_all()
        if full:
            made.close()
            raise mmfast.MmfastError(f"all {self.most} places are taken; try again in some minutes")
        return made

    def leave(self, who: str) -> None:
        """Close the object of a visitor, also one that is still being made."""
        with self._lock:
            self._lock.wait_for(lambda: who not in self._making)
            thing, _ = self._taken.pop(who, (None, 0.0))
        if thing is not None:
            thing.close()

    def close(self) -> None:
        for who in list(self._taken):
            self.leave(who)

    def __len__(self) -> int:
        return len(self._taken)

    def _sweep(self) -> None:
        limit = time.monotonic() - self.idle
        for who in [who for who, (_, used) in list(self._taken.items()) if used < limit]:
            self.leave(who)
