"""What was said in a session becomes text, one recording after another; few may wait."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from mmfast.serve.realtime.errors import EventError, told
from mmfast.serve.realtime.items import Item
from mmfast.serve.realtime.response import Response
from mmfast.streams.voice_ear import RATE

if TYPE_CHECKING:
    from mmfast.serve.realtime.session import Session

_KIND = "conversation.item.input_audio_transcription"


class Understanding:
    """Listens to the recordings of one session.

    Args:
        session: Whose.
        most: Recordings that wait; one more and the oldest is given up.
    """

    def __init__(self, session: Session, most: int) -> None:
        self._session, self._most = session, most
        self._waiting: dict[str, tuple[Item, asyncio.Future[None]]] = {}  # the first is at work
        self._task: asyncio.Task[None] | None = None

    def ask(self, item: Item) -> asyncio.Future[None]:
        """Make text of what was said in an item, once; done when it is, or is given up."""
        if item.id in self._waiting:
            return self._waiting[item.id][1]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._session.closed:
            future.set_result(None)
            return future
        self._give_up(self._most - 1)
        self._waiting[item.id] = item, future
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
        return future

    def heard(self, response: Response, text: str) -> None:
        """A model that answers speech itself says what it understood, of all that it was asked."""
        for item in response.asks:
            for number, part in enumerate(item.parts):
                if part.unheard:
                    part.text, part.unheard, text = text.strip(), False, ""
                    self._tell(item, number)

    def forget(self) -> None:
        """The session ends: nobody reads what still waits."""
        self._give_up(0)

    async def close(self) -> None:
        """Wait until the models have let go of it."""
        if self._task is not None:
            await self._task

    def _give_up(self, most: int) -> None:
        """Leave `most` that wait behind the one at work, the newest."""
        waiting = list(self._waiting.values())[1:]
        text = f"over {self._most} recordings wait to be written down; this one was the oldest"
        error = told(EventError(text, "too_many_recordings", type="server_error"))
        for item, future in waiting[: max(0, len(waiting) - most)]:
            del self._waiting[item.id]
            for number, part in enumerate(item.parts):
                if part.unheard:
                    part.unheard = False
                    self._tell(item, number, error)
            _done(future)

    async def _run(self) -> None:
        while self._waiting:
            item, future = next(iter(self._waiting.values()))
            try:
                await self._understand(item)
            finally:
                del self._waiting[item.id]
                _done(future)

    async def _understand(self, item: Item) -> None:
        session = self._session
        for number, part in enumerate(item.parts):
            pcm = part.pcm
            if not part.unheard or pcm is None:
                continue
            try:
                text = await session.service.work(partial(session.brain.hear, pcm))
            except Exception as error:
                part.unheard = False
                self._tell(item, number, told(error))
                continue
            if part.unheard:  # nobody else has understood it meanwhile
                part.text, part.unheard = text, False
                self._tell(item, number)

    def _tell(self, item: Item, number: int, error: dict[str, Any] | None = None) -> None:
        """Tell what was understood, where the client wants to read it."""
        session = self._session
        if not session.settings.transcribes or item.id not in session.conversation.items:
            return
        place, part = {"item_id": item.id, "content_index": number}, item.parts[number]
        if error is not None:
            session.send(type=f"{_KIND}.failed", **place, error=error)
            return
        if part.text:
            session.send(type=f"{_KIND}.delta", **place, delta=part.text)
        seconds = 0.0 if part.pcm is None else len(part.pcm) / RATE
        usage = {"type": "duration", "seconds": round(seconds, 3)}
        session.send(type=f"{_KIND}.completed", **place, transcript=part.text, usage=usage)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
