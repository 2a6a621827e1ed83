"""The clock of a stream: the real one, and one that a test moves by hand."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Tells seconds that never go back, and lets a thread wait for some of them to pass."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        ...

    def wait(self, condition: threading.Condition, until: float | None = None) -> None:
        """Wait on a held condition until it is notified or the clock reaches `until`.

        It may wake early, as any condition: check again in a loop.
        """
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of the monotonic clock."""
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float | None = None) -> None:
        """Wait on a held condition; None waits for its notification alone."""
        left = None if until is None else until - self.now()
        if left is None or left > 0:
            condition.wait(left)


class FakeClock:
    """A clock that stands still until `advance`: time-dependent code becomes deterministic."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._waiting: dict[object, tuple[threading.Condition, float]] = {}
        self._changed = threading.Condition()  # guards both above

    def now(self) -> float:
        """Seconds set by hand."""
        with self._changed:
            return self._now

    def wait(self, condition: threading.Condition, until: float | None = None) -> None:
        """Wait on a held condition until it is notified or `advance` reaches `until`."""
        if until is None:
            condition.wait()
            return
        # Registered before the time is read: an advance in between finds the condition, and
        # cannot notify before `condition.wait` has released its lock. No wake-up is lost.
        with self._changed:
            self._waiting[ticket := object()] = condition, until
            passed = self._now >= until
            self._changed.notify_all()
        try:
            if not passed:
                condition.wait()
        finally:
            with self._changed:
                del self._waiting[ticket]

    def advance(self, seconds: float) -> None:
        """Move the clock and wake everybody who waits for it."""
        with self._changed:
            self._now += seconds
            waiting = {condition for condition, _ in self._waiting.values()}
        for condition in waiting:
            with condition:
                condition.notify_all()

    def settle(self, sleepers: int = 1, patience: float = 10.0) -> None:
        """Wait, in real time, until so many threads wait for a moment yet to come.

        Raises:
            TimeoutError: They did not within `patience` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._sleepers() >= sleepers, patience):
                raise TimeoutError(f"{self._sleepers()} of {sleepers} threads wait")

    def _sleepers(self) -> int:
        return sum(until > self._now for _, until in self._waiting.values())
