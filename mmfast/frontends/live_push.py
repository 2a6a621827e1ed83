"""A source that others push frames into, from any thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from mmfast.core.errors import MediaError

_HELD = 64


class Push(Iterator[tuple[Any, float]]):
    """Frames pushed by one thread and iterated by another; `end` lets the iteration finish.

    A frame without a time gets the seconds since the first push.
    """

    def __init__(self, held: int = _HELD) -> None:
        """Let at most `held` frames wait for the consumer."""
        self._held = held
        self._queue: deque[tuple[Any, float]] = deque()
        self._error: BaseException | None = None
        self._begin: float | None = None
        self._ended = False
        self._changed = threading.Condition()

    def push(self, frame: Any, time: float | None = None, patience: float | None = None) -> bool:
        """Add a frame; wait at most `patience` seconds for room (None: as long as it takes).

        Returns:
            False where there was no room in time and the frame was not taken.

        Raises:
            MediaError: The source has ended.
        """
        with self._changed:
            at = self._now() if time is None else float(time)
            room = self._changed.wait_for(
                lambda: self._ended or len(self._queue) < self._held, patience
            )
            if self._ended:
                raise MediaError("frames are pushed into a source that has ended: open a new one")
            if room:
                self._queue.append((frame, at))
                self._changed.notify_all()
            return room

    def _now(self) -> float:
        now = time.monotonic()
        self._begin = now if self._begin is None else self._begin
        return now - self._begin

    def end(self, error: BaseException | None = None) -> None:
        """No more frames come; with `error` the iteration raises it behind those that wait."""
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def __next__(self) -> tuple[Any, float]:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._ended)
            if self._queue:
                self._changed.notify_all()
                return self._queue.popleft()
            error, self._error = self._error, None
            raise error if error is not None else StopIteration

    def close(self) -> None:
        """The consumer wants no more: what waits is dropped, pushing is an error."""
        with self._changed:
            self._ended = True
            self._queue.clear()
            self._changed.notify_all()

    interrupt = close
