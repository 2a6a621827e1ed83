"""The official client, and a server for it on this machine."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from realtime_checks import Rules
from realtime_tools import News

from mmfast.bench.suites.serve.realtime import listening

__all__ = ["Talk", "listening", "talking"]


class Talk(News):
    """A connection whose events are looked at as they come."""

    def __init__(self, connection: Any, hums: bool = True) -> None:
        super().__init__(patience=120.0)
        self.connection, self.rules = connection, Rules(hums)

    async def listen(self) -> None:
        """Until it is closed."""
        try:
            while True:
                event = json.loads(await self.connection.recv_bytes())
                self.rules.server(event)
                self.came(event)
                await self.tell()
        except AssertionError as error:
            self.error = error
            await self.tell()

    async def say(self, text: str) -> None:
        """Write, and ask for an answer."""
        content = [{"type": "input_text", "text": text}]
        item = {"type": "message", "role": "user", "content": content}
        await self.connection.conversation.item.create(item=item)
        await self.connection.response.create()

    async def speak(self, sound: str, milliseconds: int = 100, wait: float = 0.0) -> None:
        """Send sound in pieces, in real time where `wait` is their length."""
        raw, size = base64.b64decode(sound), 48 * milliseconds
        for at in range(0, len(raw), size):
            piece = base64.b64encode(raw[at : at + size]).decode()
            await self.connection.input_audio_buffer.append(audio=piece)
            await asyncio.sleep(wait)


@asynccontextmanager
async def talking(url: str, **options: Any) -> AsyncIterator[Talk]:
    """The official client, connected."""
    hums = options.pop("hums", True)
    client = AsyncOpenAI(api_key=options.pop("api_key", "none"), base_url=url, max_retries=0)
    async with client, client.realtime.connect(**{"model": "mmfast", **options}) as connection:
        talk = Talk(connection, hums)
        task = asyncio.create_task(talk.listen())
        try:
            await talk.event("session.created")
            yield talk
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if talk.error is not None:
        raise talk.error
