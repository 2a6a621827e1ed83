"""The clock of a loudspeaker: how much of a reply has sounded, and where it ran dry."""

from __future__ import annotations

from collections.abc import Iterable

from mmfast.streams.clock import Clock


class Playback:
    """Counts samples of one reply that a loudspeaker has played.

    It begins when the first sound arrives, plays without pause while there is some, and waits
    where there is none.

    Args:
        clock: Tells what time it is.
        rate: Samples per second.
        delay: Seconds between the arrival of the first sound and its start, as a buffer against
            gaps.

    Attributes:
        arrived: Samples that came so far.
        gaps: How often it ran dry between two pieces.
        silent: Seconds of these gaps.
        longest: Seconds of the longest.
    """

    def __init__(self, clock: Clock, rate: int, delay: float = 0.0) -> None:
        self.rate, self.arrived = rate, 0
        self.gaps, self.silent, self.longest = 0, 0.0, 0.0
        self._clock, self._delay = clock, delay
        self._from: float | None = None  # when the sample `_base` was due
        self._base = 0
        self._ended: int | None = None

    def add(self, samples: int) -> None:
        """So many samples arrive now."""
        if samples <= 0 or self._ended is not None:
            return
        now = self._clock.now()
        if self._from is None:
            self._from = now + self._delay
        elif (dry := now - self.dry_at()) > 1e-9:
            self.gaps, self.silent = self.gaps + 1, self.silent + dry
            self.longest = max(self.longest, dry)
            self._from, self._base = now, self.arrived
        self.arrived += samples

    def played(self) -> int:
        """Samples that have sounded; never more than have arrived."""
        if self._ended is not None:
            return self._ended
        if self._from is None:
            return 0
        # a clock adds up rounded steps: a sample that is due to a millionth of a sample is due
        due = int((self._clock.now() - self._from) * self.rate + 1e-6)
        return min(self._base + max(due, 0), self.arrived)

    def dry_at(self) -> float:
        """When all that has arrived will have sounded; now where nothing has."""
        if self._from is None:
            return self._clock.now()
        return self._from + (self.arrived - self._base) / self.rate

    def stop(self) -> int:
        """Be silent from now on; returns the samples that have sounded."""
        self._ended = self.played()
        return self._ended


def playback_gaps(pieces: Iterable[tuple[float, float]], delay: float = 0.0) -> dict[str, float]:
    """Gaps in playback of pieces of sound.

    Args:
        pieces: When each arrived and how long it is, in seconds.
        delay: Seconds from the first arrival to the start.

    Returns:
        `gaps`, their number; `gap_ms` and `longest_gap_ms`, together and of the longest; and
        `safe_delay_ms`, the least delay with which there would have been none.
    """
    found: dict[str, float] = {"gaps": 0, "gap_ms": 0.0, "longest_gap_ms": 0.0}
    first: float | None = None
    until = whole = safe = 0.0
    for at, seconds in pieces:
        if first is None:
            first, until = at, at + delay
        safe = max(safe, at - first - whole)
        if at - until > 1e-9:
            found["gaps"] += 1
            found["gap_ms"] += 1e3 * (at - until)
            found["longest_gap_ms"] = max(found["longest_gap_ms"], 1e3 * (at - until))
            until = at
        until, whole = until + seconds, whole + seconds
    return {**found, "safe_delay_ms": 1e3 * safe}
