"""Frames of a live source, read ahead by a thread with bounded waiting and a bounded delay."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from mmfast.core.errors import SpecError
from mmfast.frontends.clip import Frame
from mmfast.frontends.video.threads import Ahead
from mmfast.streams.stream import Clock

AHEAD = Ahead(frames=8, bytes=128 << 20)
_JOIN = 5.0  # seconds that `close` waits for a source that blocks and cannot be interrupted


class _Waiting(NamedTuple):
    frame: Frame
    time: float  # of the stream, seconds
    arrived: float  # on the clock, seconds


class Feed(Iterator[tuple[Frame, float]]):
    """Frames of a source, read ahead by a thread, with bounded waiting and a bounded delay.

    Without `latency` nothing is lost: the source waits while the queue is full. With it, no frame
    is handed out that has waited longer, unless it is the newest one: the oldest are dropped first,
    also where the queue is full, and counted (`dropped`). An error of the source is raised behind
    the frames that came before it.
    """

    def __init__(
        self,
        source: Iterable[tuple[Frame, float]],
        *,
        latency: float | None = None,
        clock: Clock | None = None,
        realtime: bool = False,
        ahead: Ahead = AHEAD,
    ) -> None:
        """Start reading pairs of a picture [H, W, 3] uint8 and its seconds, ascending.

        `latency` is the longest wait in seconds before a frame is dropped, None drops nothing;
        SpecError where it is not positive. `realtime` lets the frames arrive at their times and not
        earlier, as from a camera; `ahead` is how much may wait.
        """
        if latency is not None and not 0 < latency < float("inf"):
            raise SpecError(f"latency={latency!r} is not a delay: give seconds such as 0.5")
        self.dropped = self.delivered = self.arrived = 0
        self._source, self._latency, self._ahead = source, latency, ahead
        self._clock: Clock = clock or Clock()
        self._realtime = realtime
        self._queue: deque[_Waiting] = deque()
        self._bytes = 0
        self._error: BaseException | None = None
        self._ended = self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, name="mmfast-feed", daemon=True)
        self._thread.start()

    @property
    def lag(self) -> float:
        """Seconds that the oldest frame has been waiting; 0 where none waits."""
        with self._changed:
            return self._clock.now() - self._queue[0].arrived if self._queue else 0.0

    def stats(self) -> dict[str, float]:
        """Counts so far and the current lag in seconds."""
        with self._changed:
            return {
                "arrived": self.arrived,
                "delivered": self.delivered,
                "dropped": self.dropped,
                "waiting": len(self._queue),
                "waiting_bytes": self._bytes,
                "lag": self.lag,
            }

    def __next__(self) -> tuple[Frame, float]:
        with self._changed:
            while not self._queue and not self._ended and not self._closed:
                self._clock.wait(self._changed)
            if not self._queue:
                error, self._error = self._error, None
                raise error if error is not None else StopIteration
            if self._latency is not None:
                oldest = self._clock.now() - self._latency
                while len(self._queue) > 1 and self._queue[0].arrived < oldest:
                    self._drop()
            first = self._pop()
            self.delivered += 1
            self._changed.notify_all()
            return first.frame, first.time

    def _pop(self) -> _Waiting:
        first = self._queue.popleft()
        self._bytes -= first.frame.nbytes
        return first

    def _drop(self) -> None:
        self._pop()
        self.dropped += 1

    def _produce(self) -> None:
        error: BaseException | None = None
        try:
            self._run(iter(self._source))
        except Exception as caught:  # raised again at the consumer
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _run(self, pairs: Iterator[tuple[Frame, float]]) -> None:
        """Read to the end, or until `close`; a generator is closed by the thread that runs it."""
        begin: float | None = None
        try:
            for frame, time in pairs:
                if begin is None:
                    begin = self._clock.now() - time
                if not self._add(frame, time, begin + time if self._realtime else None):
                    return
        finally:
            with suppress(Exception):
                getattr(pairs, "close", lambda: None)()

    def _add(self, frame: Frame, time: float, due: float | None) -> bool:
        """Queue a frame when it is due and there is room; False once the feed is closed."""
        with self._changed:
            while not self._closed and due is not None and self._clock.now() < due:
                self._clock.wait(self._changed, due)
            while not self._closed and self._full(frame):
                if self._latency is not None:
                    self._drop()
                else:
                    self._clock.wait(self._changed)
            if self._closed:
                return False
            self._queue.append(_Waiting(frame, time, self._clock.now()))
            self._bytes += frame.nbytes
            self.arrived += 1
            self._changed.notify_all()
            return True

    def _full(self, frame: Frame) -> bool:
        return self._ahead.full(len(self._queue), self._bytes + frame.nbytes - 1)

    def close(self) -> None:
        """Stop the source, drop what waits and join the thread; safe to call twice."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._bytes = 0
            self._changed.notify_all()
        interrupt: Any = getattr(self._source, "interrupt", None)
        if interrupt is not None:  # sources that may block know how to be woken
            interrupt()
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN)

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
