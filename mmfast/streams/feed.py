"""Frames of a live source, read ahead by a thread with bounded waiting and a bounded delay.

`Watch` takes them into a session, and `Sources` counts the watches of one.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from mmfast.core.errors import MmfastError, SpecError, unknown
from mmfast.frontends.clip import Frame
from mmfast.frontends.live.source import live_frames
from mmfast.frontends.video.threads import Ahead
from mmfast.streams.recent import GAP
from mmfast.streams.stream import Clock

AHEAD = Ahead(frames=8, bytes=128 << 20)
_ERRORS = 64  # of sources, the latest
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
        if latency is not None and not (
            isinstance(latency, int | float) and 0 < latency < float("inf")
        ):
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


class Sources:
    """The watches of a session that run, and the figures of those that have ended."""

    def __init__(self) -> None:
        self.running: list[Watch] = []
        self.opened = 0
        self._dropped = 0
        self._events: Counter[str] = Counter()
        self._errors: deque[str] = deque(maxlen=_ERRORS)
        self._lock = threading.Lock()

    def add(self, watch: Watch) -> None:
        """Count a watch in."""
        with self._lock:
            self.opened += 1
            self.running.append(watch)

    def end(self, watch: Watch) -> None:
        """Keep the figures of a watch in its place: it holds decoders and frames."""
        with self._lock:
            if watch in self.running:
                self.running.remove(watch)
                row = watch.stats()
                self._dropped += row["dropped"]
                self._events.update(row["events"])
                self._errors.extend([row["error"]] if row["error"] else [])

    def stats(self, odd: Counter[str]) -> dict[str, Any]:
        """Figures of all sources; `odd` counts irregular times that the stream has put right."""
        with self._lock:
            feeds = [watch.stats() for watch in self.running]
            for events in (self._events, *(feed["events"] for feed in feeds)):
                odd.update(events)
            return {
                "dropped": self._dropped + sum(feed["dropped"] for feed in feeds),
                "lag": max((feed["lag"] for feed in feeds), default=0.0),
                "source_events": dict(odd),
                "errors": [*self._errors, *(feed["error"] for feed in feeds if feed["error"])],
            }


# options of a source that a watch hands on, and those of the watch itself
_SOURCE = ("ahead", "allow_network", "rate", "timeout")
_OWN = ("background", "each", "fps", "latency", "realtime")


def _check_options(each: Any, realtime: Any, options: Iterable[str]) -> None:
    """Refuse an option that a watch does not know, and what could fail at the first frame alone."""
    for name in options:
        if name not in _SOURCE:
            raise MmfastError(unknown("option", name, (*_SOURCE, *_OWN)))
    if each is not None and not callable(each):
        raise MmfastError(f"each={each!r} cannot be called; give a function of seconds, or None")
    if not isinstance(realtime, bool):
        raise MmfastError(f"realtime={realtime!r} is not allowed; give True or False")


class Watch:
    """Frames of one source on their way into a session.

    `fps` frames are taken per second, None takes all. A frame waits `latency` seconds at most:
    older ones are dropped, and counted, while the model is busy; None drops nothing, and the source
    waits. `realtime` lets a file's frames arrive at their times, as a camera's do. `each` is called
    after every frame with its seconds, in the thread that watches. `options` are `allow_network`,
    `rate`, `timeout` of `mmfast.frontends.live.source.live_frames`, which explains the source too.

    `feed` knows `lag` and `dropped`; `error` is the exception that ended it, if any.
    """

    def __init__(
        self,
        session: Any,
        source: Any,
        *,
        fps: float | None,
        latency: float | None = None,
        realtime: bool = False,
        clock: Clock | None = None,
        each: Callable[[float], Any] | None = None,
        **options: Any,
    ) -> None:
        _check_options(each, realtime, options)
        self._session, self._each = session, each
        # pictures for questions about motion come more often than frames for the model
        self._fps, every = fps, 1
        if session.stream.recent is not None and isinstance(fps, int | float) and fps > 0:
            every = max(1, math.ceil(1 / (GAP * fps)))
        self._near = 0.5 / every  # of a frame's turn: as near as any other frame can come
        dense = fps if every == 1 or fps is None else fps * every
        self.live = live_frames(source, fps=dense, limits=session.limits, **options)
        self.feed = Feed(self.live, latency=latency, clock=clock, realtime=realtime)
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._stopped = False

    def start(self) -> None:
        """Watch in a thread."""
        self._thread = threading.Thread(target=self._quietly, name="mmfast-watch", daemon=True)
        self._thread.start()

    def _quietly(self) -> None:
        try:
            self.run()
        except Exception as error:  # raised by `join`, shown in the session's figures
            self.error = error

    def run(self) -> None:
        """Push frames until `stop`, or the source ends; MediaError where it stalls or dies."""
        self._session.new_source()
        start, turn = None, -1
        try:
            for frame, seconds in self.feed:
                if self._stopped or self._session.closed:
                    return
                start = seconds if start is None else start
                now = turn + 1
                if self._near < 0.5 and self._fps is not None:
                    now = math.floor((seconds - start) * self._fps + self._near)
                if now <= turn:
                    self._session.glance(frame, seconds)
                    continue
                turn = now
                self._session.push(frame, seconds)
                if self._each is not None:
                    self._each(self._session.stream.timeline.last or 0.0)
        except Exception as error:
            if isinstance(error, MmfastError) and (self._stopped or self._session.closed):
                return  # it was woken to end
            self.error = error
            raise
        finally:
            self.feed.close()
            self._session.sources.end(self)

    @property
    def running(self) -> bool:
        """Its thread is still watching."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the source and return True; MediaError where it stalled or died."""
        if self._thread is not None:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error
        return not self.running

    def stop(self) -> None:
        """End it; frames that wait are not read."""
        self._stopped = True
        self.feed.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def stats(self) -> dict[str, Any]:
        """Figures of the feed, and what the source did wrong."""
        events = {name: count for name, count in self.live.events.items() if count}
        error = None if self.error is None else str(self.error)
        return {"source": self.live.name, **self.feed.stats(), "events": events, "error": error}
