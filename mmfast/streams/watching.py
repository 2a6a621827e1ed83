"""A source that a session watches, at once or in a thread of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mmfast.core.errors import MmfastError
from mmfast.frontends.live import live_frames
from mmfast.streams.feed import Feed

if TYPE_CHECKING:
    from mmfast.streams.clock import Clock
    from mmfast.streams.session import Session


class Watch:
    """Frames of one source on their way into a session.

    Args:
        session: Where they go.
        source: See `mmfast.frontends.live.live_frames`.
        fps: Frames to take per second; None takes all.
        latency: Longest wait of a frame in seconds: older ones are dropped, and counted, while
            the model is busy. None drops nothing, and the source waits.
        realtime: Let a file's frames arrive at their times, as a camera's do.
        clock: Tells the time; the machine's if not given.
        each: Called after every frame with its seconds, in the thread that watches.
        **options: `allow_network`, `rate`, `timeout`; see `live_frames`.

    Attributes:
        feed: Reads ahead; knows `lag` and `dropped`.
        error: What ended it, if it did not end by itself.
    """

    def __init__(
        self,
        session: Session,
        source: Any,
        *,
        fps: float | None,
        latency: float | None = None,
        realtime: bool = False,
        clock: Clock | None = None,
        each: Callable[[float], Any] | None = None,
        **options: Any,
    ) -> None:
        self._session, self._each = session, each
        self.live = live_frames(source, fps=fps, limits=session.limits, **options)
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
        except Exception as error:  # told by `join` and in the session's figures
            self.error = error

    def run(self) -> None:
        """Push frame after frame until the source ends, the session is closed or `stop`.

        Raises:
            MediaError: The source stalls or dies.
        """
        self._session.new_source()
        try:
            for frame, seconds in self.feed:
                if self._stopped or self._session.closed:
                    return
                self._session.push(frame, seconds)
                if self._each is not None:
                    self._each(self._session.stream.timeline.last or 0.0)
        except MmfastError as error:
            if self._stopped or self._session.closed:
                return  # it was woken to end
            self.error = error
            raise
        finally:
            self.feed.close()

    @property
    def running(self) -> bool:
        """Whether its thread still watches."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end of the source; says whether it has ended.

        Raises:
            MediaError: The source stalled or died.
        """
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


def together(watches: Sequence[Watch], odd: Counter[str]) -> dict[str, Any]:
    """Figures of all sources of a session; `odd` is what the session itself has put right."""
    feeds = [watch.stats() for watch in watches]
    for feed in feeds:
        odd.update(feed["events"])
    return {
        "dropped": sum(feed["dropped"] for feed in feeds),
        "lag": max((feed["lag"] for feed in feeds), default=0.0),
        "source_events": dict(odd),
        "errors": [feed["error"] for feed in feeds if feed["error"]],
    }
