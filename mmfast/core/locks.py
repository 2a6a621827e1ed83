"""Locks whose holder is never left waiting inside a call of a model that is run in slices."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import threading
from types import CodeType, FrameType
from typing import Any


class _HeldLocks(threading.local):
    count = 0  # locks that this thread holds


_HELD = _HeldLocks()


class WholeLock:
    """A re-entrant lock; `Slicer` stops no call that holds one, so that nobody waits in vain."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; return whether it was taken."""
        taken = self._lock.acquire(blocking)
        _HELD.count += taken
        return taken

    __enter__ = acquire

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()  # a copy is another lock, and free

    def release(self) -> None:
        """Give the lock back."""
        _HELD.count -= 1
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()


def _of_others() -> frozenset[CodeType]:
    """Functions of Python itself that hold a lock while they call what may call torch."""
    imports: Any = importlib.import_module("importlib._bootstrap")
    found = {imports._find_and_load.__code__, logging.Handler.handle.__code__}
    if sys.version_info < (3, 12):  # one lock for a property of all instances
        found.add(functools.cached_property.__get__.__code__)
    return frozenset(found)


_OTHERS = _of_others()


def holding() -> bool:
    """Return True where this thread holds a lock that others may wait for."""
    if _HELD.count:
        return True
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _OTHERS:
            return True
        frame = frame.f_back
    return False
