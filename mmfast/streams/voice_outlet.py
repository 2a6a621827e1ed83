"""Events on their way out, in order; what a cancel overtakes never leaves."""

from __future__ import annotations

from collections import deque
from typing import Any

from mmfast.streams.clock import Clock
from mmfast.streams.voice_events import Kind, VoiceEvent

MOST = 10_000  # events


class Outlet:
    """Numbers events and keeps them until somebody fetches them.

    It locks nothing: its owner does. Sound is bounded by who makes it, which waits while too much
    of it is here; other events are a few a turn, and the oldest are dropped where nobody fetches
    them for hours.

    Args:
        clock: Tells the time of an event.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock, self._began, self._number = clock, clock.now(), 0
        self._waiting: deque[VoiceEvent] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._waiting)

    def emit(self, kind: Kind, **fields: Any) -> None:
        """Append an event."""
        ms = round(1e3 * (self._clock.now() - self._began), 3)
        self._waiting.append(VoiceEvent(kind, self._number, ms, **fields))
        self._number += 1

    def purge(self, reply: str) -> None:
        """Forget the deltas of a reply that nobody has fetched."""
        left = [e for e in self._waiting if e.reply != reply or e.kind not in ("text", "audio")]
        self._waiting = deque(left, MOST)

    def fetch(self) -> list[VoiceEvent]:
        """All that wait, oldest first."""
        found = list(self._waiting)
        self._waiting.clear()
        return found
