"""Events on their way to the client: numbered, bounded, and fenced by response."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class _Letter:
    text: str
    response: str  # whose delta it is; "" of all other events
    sent: Callable[[], None] | None


class Outbox:
    """Holds events until the socket takes them.

    A response waits for `room` before it makes more, so that a slow reader slows its own responses
    down and nobody else's; the reader of client events waits for `calm`, so that who sends without
    reading is held up by the network.

    Args:
        soft: Bytes from which responses wait.
        hard: Bytes from which no more events are read.
    """

    def __init__(self, soft: int = 1 << 20, hard: int = 4 << 20) -> None:
        self.soft, self.hard, self.bytes = soft, hard, 0
        self._letters: deque[_Letter] = deque()
        self._number, self.closed = 0, False
        self._waiters: list[asyncio.Future[None]] = []

    def put(
        self,
        event: Mapping[str, Any],
        delta_of: str = "",
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Append an event; `sent` is called when it leaves, and never if it is purged."""
        if self.closed:
            return
        self._number += 1
        text = json.dumps({"event_id": f"event_{self._number}", **event}, separators=(",", ":"))
        self._letters.append(_Letter(text, delta_of, sent))
        self.bytes += len(text)
        self._wake()

    def purge(self, response: str) -> None:
        """Forget the deltas of a response that have not left."""
        left = [each for each in self._letters if each.response != response]
        self.bytes -= sum(len(each.text) for each in self._letters)
        self.bytes += sum(len(each.text) for each in left)
        self._letters = deque(left)
        self._wake()

    async def next(self) -> str | None:
        """The oldest event, which counts as sent from now on; None when closed and empty."""
        await self._until(lambda: bool(self._letters) or self.closed)
        if not self._letters:
            return None
        letter = self._letters.popleft()
        self.bytes -= len(letter.text)
        if letter.sent is not None:
            letter.sent()
        self._wake()
        return letter.text

    async def room(self) -> None:
        """Wait until a response may go on."""
        await self._until(lambda: self.bytes < self.soft or self.closed)

    async def calm(self) -> None:
        """Wait until more events may be read."""
        await self._until(lambda: self.bytes < self.hard or self.closed)

    def close(self) -> None:
        """No more events come; those that wait can still be fetched."""
        self.closed = True
        self._wake()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
