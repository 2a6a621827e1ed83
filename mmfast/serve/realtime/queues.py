"""Bounded queues of one session: events on their way out, and jobs that wait for a model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from mmfast.serve.realtime.conversation import ConversationItem
from mmfast.serve.realtime.protocol import EventError, error_fields

T = TypeVar("T")


@dataclass
class _OutgoingEvent:
    text: str
    response: str  # whose delta it is; "" of all other events
    sent: Callable[[], None] | None


class Outbox:
    """Holds events until the socket takes them: numbered, bounded, and grouped by response.

    From `soft` bytes on, a response waits for `room` before it makes more, so that a slow reader
    slows down its own responses alone. From `hard` bytes on, the reader of client events waits for
    `calm`, so that a client that sends without reading is held up by the network.
    """

    def __init__(self, soft: int = 1 << 20, hard: int = 4 << 20) -> None:
        self.soft, self.hard, self.bytes = soft, hard, 0
        self._events: deque[_OutgoingEvent] = deque()
        self._number, self.closed = 0, False
        self._changed = asyncio.Event()

    def put(
        self, event: Mapping[str, Any], delta_of: str = "", sent: Callable[[], None] | None = None
    ) -> None:
        """Append an event; `sent` is called when it leaves, and never if it is purged."""
        if self.closed:
            return
        self._number += 1
        text = json.dumps({"event_id": f"event_{self._number}", **event}, separators=(",", ":"))
        self._events.append(_OutgoingEvent(text, delta_of, sent))
        self.bytes += len(text)
        self._wake()

    def purge(self, response: str) -> None:
        """Forget the deltas of a response that have not left."""
        self._events = deque(each for each in self._events if each.response != response)
        self.bytes = sum(len(each.text) for each in self._events)
        self._wake()

    async def next(self) -> str | None:
        """Return the oldest event, which counts as sent from now on; None: closed and empty."""
        await self._until(lambda: bool(self._events) or self.closed)
        if not self._events:
            return None
        event = self._events.popleft()
        self.bytes -= len(event.text)
        if event.sent is not None:
            event.sent()
        self._wake()
        return event.text

    async def room(self) -> None:
        """Wait until a response may go on."""
        await self._until(lambda: self.bytes < self.soft or self.closed)

    async def calm(self) -> None:
        """Wait until more events may be read."""
        await self._until(lambda: self.bytes < self.hard or self.closed)

    def close(self) -> None:
        """Take no more events; those that wait can still be fetched."""
        self.closed = True
        self._wake()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Backlog(Generic[T]):
    """Jobs that one task does in turn; the oldest beyond `most` waiting ones are given up.

    `work` reports its own errors; `lost` is called for a job that is given up.
    """

    def __init__(
        self, most: int, work: Callable[[T], Awaitable[None]], lost: Callable[[T], None]
    ) -> None:
        self._most, self._work, self._lost = most, work, lost
        self._jobs: dict[str, tuple[T, asyncio.Future[None]]] = {}  # the first is at work
        self._task: asyncio.Task[None] | None = None
        self.closed = False

    def put(self, key: str, job: T) -> asyncio.Future[None]:
        """Append a job, once while it waits; the result comes when it is done or given up."""
        if key in self._jobs:
            return self._jobs[key][1]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.closed:
            future.set_result(None)
            return future
        self._give_up(self._most - 1)
        self._jobs[key] = job, future
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return future

    def pending(self) -> list[asyncio.Future[None]]:
        """Return the results of the jobs that are not done yet."""
        return [future for _, future in self._jobs.values()]

    def clear(self) -> None:
        """Give up all waiting jobs and take no more, since the session ends."""
        self.closed = True
        self._give_up(0)

    async def finished(self) -> None:
        """Wait until the model has let go of the job at work."""
        if self._task is not None:
            await self._task

    def _give_up(self, most: int) -> None:
        """Give up the oldest waiting jobs, so that `most` remain."""
        waiting = list(self._jobs.items())[1:]
        for key, (job, future) in waiting[: max(0, len(waiting) - most)]:
            del self._jobs[key]
            self._lost(job)
            _resolve(future)

    async def _run(self) -> None:
        while self._jobs:
            key, (job, future) = next(iter(self._jobs.items()))
            try:
                await self._work(job)
            finally:
                del self._jobs[key]
                _resolve(future)


@dataclass
class _SeenFrame:
    picture: Any  # decoded, or an address in base64
    time: float
    event_id: str | None


class PictureQueue(Backlog[_SeenFrame]):
    """Frames that wait to be seen; beyond `most`, the oldest is dropped.

    `see` reads a picture taken at a given second, `fail` reports an error of the event of that
    name. `counts` has `came`, `seen`, `dropped` (too many waited) and `failed` (no picture).
    """

    def __init__(
        self,
        most: int,
        see: Callable[[Any, float], Awaitable[None]],
        fail: Callable[[BaseException, str | None], None],
    ) -> None:
        super().__init__(most, self._watch, lambda _: self.counts.update(dropped=1))
        self.counts: Counter[str] = Counter(came=0, seen=0, dropped=0, failed=0)
        self._see, self._fail = see, fail

    def add(self, picture: Any, time: float, event_id: str | None) -> None:
        """Append a frame, decoded or as its data URI."""
        self.counts["came"] += 1
        self.put(str(self.counts["came"]), _SeenFrame(picture, time, event_id))

    async def _watch(self, frame: _SeenFrame) -> None:
        try:
            await self._see(frame.picture, frame.time)
            self.counts["seen"] += 1
        except Exception as error:
            self.counts["failed"] += 1
            self._fail(error, frame.event_id)


class RecordingQueue(Backlog[ConversationItem]):
    """Recordings that wait for their transcripts; beyond `most`, the oldest is given up.

    `show` reports the transcript of a part of an item, or the error instead.
    """

    def __init__(
        self,
        most: int,
        hear: Callable[[Tensor], Awaitable[str]],
        show: Callable[[ConversationItem, int, dict[str, Any] | None], None],
    ) -> None:
        super().__init__(most, self._understand, self._lose)
        self._hear, self._show = hear, show

    async def _understand(self, item: ConversationItem) -> None:
        for number, part in item.unheard:
            if part.pcm is None or not part.unheard:
                continue
            text, error = "", None
            try:
                text = await self._hear(part.pcm)
            except Exception as raised:
                error = error_fields(raised)
            if part.unheard:  # no transcript has come meanwhile
                part.text, part.unheard = text, False
                self._show(item, number, error)

    def _lose(self, item: ConversationItem) -> None:
        text = f"over {self._most} recordings wait to be written down; this one was the oldest"
        error = error_fields(EventError(text, "too_many_recordings", type="server_error"))
        for number, part in item.unheard:
            part.unheard = False
            self._show(item, number, error)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
