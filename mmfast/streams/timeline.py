"""The times of a stream ascend, whatever its source says."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

from mmfast.core.errors import MediaError

# A frame so many seconds behind the last one is late; one further back is a source begun anew.
LATE = 1.0


@dataclass(frozen=True)
class Timeline:
    """Seconds of the stream so far; a value.

    Attributes:
        last: Of the last frame; None before the first.
        offset: From the source's seconds to the stream's.
        repeated: Frames left out because their time was the last one's.
        late: Frames left out because they came out of order.
        jumps: How often the source went back in time; the stream goes on.
        fresh: The next frame is of another source, whose times need not ascend from here.
    """

    last: float | None = None
    offset: float = 0.0
    repeated: int = 0
    late: int = 0
    jumps: int = 0
    fresh: bool = False

    def step(self, time: object, interval: float) -> tuple[Timeline, float | None]:
        """Take the time of the next frame.

        Args:
            time: Seconds on the source's clock; None is one interval after the last frame.
            interval: Seconds between frames where nothing else is known.

        Returns:
            The timeline behind it, and its seconds on the stream's clock; None leaves it out.

        Raises:
            MediaError: The time is no finite number.
        """
        if time is None:
            now = 0.0 if self.last is None else self.last + interval
            return replace(self, last=now, fresh=False), now
        if isinstance(time, bool) or not isinstance(time, Real) or not math.isfinite(time):
            raise MediaError(f"time={time!r} of a frame is no number of seconds; give e.g. 1.5")
        now = float(time) + self.offset
        if self.last is None or now > self.last:
            return replace(self, last=now, fresh=False), now
        if not self.fresh and now == self.last:
            return replace(self, repeated=self.repeated + 1), None
        if not self.fresh and now >= self.last - LATE:
            return replace(self, late=self.late + 1), None
        jumps, now = self.jumps + (not self.fresh), self.last + interval
        offset = now - float(time)
        return replace(self, last=now, offset=offset, jumps=jumps, fresh=False), now

    def again(self) -> Timeline:
        """Before the first frame of another source."""
        return replace(self, fresh=True)

    def snapshot(self) -> dict[str, Any]:
        """Plain values, for saving."""
        return asdict(self)
