"""A lock under which questions go before frames."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Frames come all the time, so a plain lock might never let a question through.

    Whoever holds it may take it again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calm = threading.Condition()
        self._urgent = 0  # questions that wait or run

    @contextmanager
    def frame(self) -> Iterator[None]:
        """Hold it, after all questions that wait."""
        self._let_pass()
        with self._lock:
            yield

    def _let_pass(self) -> None:
        with self._calm:
            # Where this thread holds the lock already, no question can run before it is done.
            if not self._lock._is_owned():  # type: ignore[attr-defined]
                self._calm.wait_for(lambda: not self._urgent)

    @contextmanager
    def question(self) -> Iterator[None]:
        """Hold it as soon as the frame that is being read is done."""
        with self._calm:
            self._urgent += 1
        try:
            with self._lock:
                yield
        finally:
            with self._calm:
                self._urgent -= 1
                self._calm.notify_all()
