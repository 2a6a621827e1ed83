"""Wait for a source no longer than agreed: it is read by a thread that can be left behind."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from mmfast.core.errors import MediaError

_HELD = 4  # items that wait for the consumer; a camera's own buffer drops what does not fit


class Pump(Iterator[Any]):
    """Items of a source that may stall, in order, each within `timeout` seconds of being asked.

    A call that blocks in foreign code cannot be interrupted. After a stall or `close` the thread
    is left where it hangs, ends when the call returns, and never keeps the process alive.
    """

    def __init__(self, items: Iterable[Any], name: str, timeout: float | None) -> None:
        """Start reading `items`; None waits for ever, but `close` from elsewhere still works."""
        self._items, self._name, self._timeout = items, name, timeout
        self._queue: deque[Any] = deque()
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, name="mmfast-source", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        with self._changed:
            while not self._queue and not self._ended and not self._closed:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    self._closed = True
                    raise MediaError(
                        f"{self._name} gave no frame for {self._timeout:g} s: check that it is "
                        f"on and reachable, or raise timeout="
                    )
                self._changed.wait(left)
            if not self._queue:
                error, self._error = self._error, None
                raise error if error is not None and not self._closed else StopIteration
            self._changed.notify_all()
            return self._queue.popleft()

    def _read(self) -> None:
        error: BaseException | None = None
        items: Iterator[Any] = iter(())
        try:
            items = iter(self._items)
            for item in items:
                if not self._keep(item):
                    break
        except Exception as caught:  # raised again at the consumer
            error = caught
        with suppress(Exception):
            getattr(items, "close", lambda: None)()
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _keep(self, item: Any) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._queue) < _HELD)
            if not self._closed:
                self._queue.append(item)
                self._changed.notify_all()
            return not self._closed

    def close(self) -> None:
        """Drop what waits and let the thread end; safe from any thread."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
