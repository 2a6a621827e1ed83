"""How far a reader may run ahead of its consumer, and a queue that keeps several in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MediaError


@dataclass(frozen=True)
class Ahead:
    """Decoded frames that may wait for their consumer; both figures hold.

    Attributes:
        frames: Number of frames.
        bytes: Their RGB bytes together. A single larger frame passes alone.
    """

    frames: int = 128
    bytes: int = 256 << 20

    def __post_init__(self) -> None:
        if self.frames < 1 or self.bytes < 1:
            raise MediaError(
                f"ahead={self.frames} frames, {self.bytes} bytes: give at least 1 of each"
            )

    def full(self, frames: int, size: int) -> bool:
        """Say whether these must wait before another frame is added."""
        return frames >= self.frames or (frames > 0 and size >= self.bytes)


DEFAULT_AHEAD = Ahead()


class Stopped(Exception):  # noqa: N818 - ends a thread, never seen by a caller
    """The consumer has gone."""


@dataclass
class Ordered:
    """Items of several producers, handed out lane after lane: lane 0 to its end, then lane 1.

    The lane that is being emptied may always add one item, however much the later lanes hold, so
    that the bound can never block the one producer for which the consumer waits.
    """

    ahead: Ahead
    _lanes: dict[int, deque[Any]] = field(default_factory=dict)
    _ended: dict[int, BaseException | None] = field(default_factory=dict)
    _turn: int = 0
    _lanes_end: int | None = None
    _frames: int = 0
    _bytes: int = 0
    _peak: tuple[int, int] = (0, 0)
    _stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def stopped(self) -> bool:
        """Whether producers should give up."""
        return self._stopped

    @property
    def peak(self) -> tuple[int, int]:
        """Most frames and bytes that have waited at once."""
        return self._peak

    def put(self, lane: int, item: Any, size: int) -> None:
        """Add an item of `size` bytes to a lane; wait for room.

        Raises:
            Stopped: Nobody will take it.
        """
        with self._changed:
            mine = self._lanes.setdefault(lane, deque())
            self._changed.wait_for(lambda: self._stopped or self._room(lane, mine, size))
            if self._stopped:
                raise Stopped
            mine.append((item, size))
            self._frames, self._bytes = self._frames + 1, self._bytes + size
            self._peak = (max(self._peak[0], self._frames), max(self._peak[1], self._bytes))
            self._changed.notify_all()

    def _room(self, lane: int, mine: deque[Any], size: int) -> bool:
        free = not self.ahead.full(self._frames, self._bytes + size - 1)
        return free or (lane == self._turn and not mine)

    def end(self, lane: int, error: BaseException | None = None) -> None:
        """Close a lane; the consumer meets `error` behind the items before it."""
        with self._changed:
            self._ended[lane] = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Let every producer's next `put` end in `Stopped`, and drop what waits."""
        with self._changed:
            self._stopped = True
            self._lanes.clear()
            self._changed.notify_all()

    def finish(self, lanes: int) -> None:
        """There are lanes 0 to `lanes` - 1 and no more."""
        with self._changed:
            self._lanes_end = lanes
            self._changed.notify_all()

    def drain(self) -> Iterator[Any]:
        """Yield the items of all lanes in order; raise the first error met."""
        while True:
            with self._changed:
                self._changed.wait_for(self._ready)
                if self._turn == self._lanes_end:
                    return
                mine = self._lanes.get(self._turn)
                if not mine:
                    error = self._ended.pop(self._turn)
                    self._lanes.pop(self._turn, None)
                    self._turn += 1
                    self._changed.notify_all()
                    if error is not None:
                        raise error
                    continue
                item, size = mine.popleft()
                self._frames, self._bytes = self._frames - 1, self._bytes - size
                self._changed.notify_all()
            yield item

    def _ready(self) -> bool:
        waits = bool(self._lanes.get(self._turn)) or self._turn in self._ended
        return waits or self._turn == self._lanes_end
