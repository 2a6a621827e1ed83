"""Live video: frames on their way into the stream's memory, the oldest dropped under load."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmfast.serve.realtime.errors import EventError

if TYPE_CHECKING:
    from mmfast.serve.realtime.session import Session


@dataclass
class _Frame:
    number: int
    time: float
    picture: Any  # decoded, or an address in base64
    event_id: str | None


class Seeing:
    """Watches for one session.

    Frames are decoded and read one after another, by one task; `most` of them may wait.

    Args:
        session: Whose.
        most: Frames that wait.

    Attributes:
        counts: `came`, `seen`, `dropped` (too many waited), `failed` (were no pictures).
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session, self._most = session, most
        self._waiting: deque[_Frame] = deque()
        self.counts: Counter[str] = Counter(came=0, seen=0, dropped=0, failed=0)
        self._task: asyncio.Task[None] | None = None
        self._done = 0  # number of the last frame that was seen or dropped
        self._settled: list[tuple[int, asyncio.Future[None]]] = []

    def check(self, param: str) -> None:
        """Raise an `EventError` where the model sees nothing."""
        if not self._session.brain.sees:
            raise EventError(
                "this model sees nothing; start the server with one that does", param=param
            )

    def add(self, picture: Any, time: float | None = None, event_id: str | None = None) -> None:
        """A frame, decoded or as its data URI, of so many seconds; None is now."""
        if time is None:
            time = self._session.now() - self._session.began
        self.counts["came"] += 1
        self._waiting.append(_Frame(self.counts["came"], time, picture, event_id))
        while len(self._waiting) > self._most:
            self._waiting.popleft()
            self.counts["dropped"] += 1
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._watch())

    async def _watch(self) -> None:
        while self._waiting and not self._session.closed:
            frame = self._waiting.popleft()
            try:
                await self._read(frame)
                self.counts["seen"] += 1
            except Exception as error:
                self.counts["failed"] += 1
                self._session.fail(error, frame.event_id)
            self._pass(frame.number)

    async def _read(self, frame: _Frame) -> None:
        session, picture = self._session, frame.picture
        if isinstance(picture, str):
            picture = await session.service.picture(picture, "image")
        if not session.closed:
            await session.service.work(lambda: session.brain.see(picture, frame.time))

    def _pass(self, number: int) -> None:
        self._done = number
        left = []
        for wanted, waiter in self._settled:
            if wanted > number and not self._session.closed:
                left.append((wanted, waiter))
            elif not waiter.done():
                waiter.set_result(None)
        self._settled = left

    async def settled(self, number: int) -> None:
        """Wait until frames up to this number have been seen or dropped."""
        if self._done >= number or (not self._waiting and (not self._task or self._task.done())):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._settled.append((number, waiter))
        await waiter

    async def close(self) -> None:
        """Forget what waits, and end."""
        self._waiting.clear()
        if self._task is not None:
            await self._task
        self._pass(self.counts["came"])
