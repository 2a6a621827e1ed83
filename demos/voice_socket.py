"""The voice tab's connection: sound of the microphone in, events and sound of the reply out.

Messages are JSON texts; sound is 16-bit PCM in binary messages: from the browser at the rate that
its first message named, to the browser behind the event `audio` that it belongs to.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.websockets import WebSocket, WebSocketDisconnect

import mmfast
from mmfast.demos.polite import one_line
from mmfast.demos.seats import Seats
from mmfast.demos.shelf import Shelf
from mmfast.demos.voice_talk import Talk

MOST = 4  # conversations at once
LONGEST = 900.0  # seconds of a conversation
SILENCE = 120.0  # seconds in which the browser says nothing at all
BIGGEST = 1 << 20  # bytes of a message
POLICY, LATER = 1008, 1013  # codes of WebSocket: not allowed; try again later


class VoiceSocket:
    """Serves conversations, each on a connection of its own.

    Args:
        shelf: Where the models are.
        who: Says who a request comes from, or None where nobody may; as `auth_dependency` of
            `gradio.mount_gradio_app`.
    """

    def __init__(self, shelf: Shelf, who: Callable[[Any], Any] | None = None) -> None:
        self.shelf, self.who = shelf, who
        self.seats: Seats[Talk] = Seats(MOST)

    async def serve(self, socket: WebSocket) -> None:
        """One connection, until either side ends it."""
        await socket.accept()
        if not await self._welcome(socket):
            await socket.close(POLICY)
            return
        name, code = uuid.uuid4().hex, 1000
        try:
            async with asyncio.timeout(LONGEST):
                await self._converse(socket, name)
        except mmfast.MmfastError as error:
            await _tell(socket, one_line(error))
            code = LATER
        except TimeoutError:
            await _tell(socket, "the conversation is over: it had been idle, or grown too long")
        except (WebSocketDisconnect, RuntimeError):
            return  # the visitor left
        finally:
            await asyncio.to_thread(self.seats.leave, name)
        with contextlib.suppress(RuntimeError):
            await socket.close(code)

    async def _welcome(self, socket: WebSocket) -> bool:
        """Whether the page came from here: pages of others may not use the visitor's browser."""
        origin, host = socket.headers.get("origin"), socket.headers.get("host")
        if origin is not None and urlsplit(origin).netloc != host:
            return False
        if self.who is None:
            return True
        found = self.who(socket)
        return (await found if asyncio.iscoroutine(found) else found) is not None

    async def _converse(self, socket: WebSocket, name: str) -> None:
        wish = await _message(socket)
        if not isinstance(wish, dict):
            raise mmfast.MmfastError("a conversation begins with a JSON message")
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Any]()

        def tell(event: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the server is closing: nobody listens
                loop.call_soon_threadsafe(events.put_nowait, event)

        def made() -> Talk:
            return Talk(self.shelf, wish, tell)

        talk = await asyncio.to_thread(self.seats.take, name, made)
        await socket.send_text(json.dumps({"kind": "ready"}))
        talk.start()
        telling = asyncio.create_task(_send(socket, events))
        try:
            while True:
                message = await _message(socket)
                self.seats.get(name)
                await asyncio.to_thread(talk.take, message)
        finally:
            telling.cancel()
            with contextlib.suppress(asyncio.CancelledError, RuntimeError, WebSocketDisconnect):
                await telling


async def _message(socket: WebSocket) -> Any:
    """The next message: sound as bytes, or what a JSON text says."""
    async with asyncio.timeout(SILENCE):
        message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1000))
    data = message.get("bytes") or message.get("text") or ""
    if len(data) > BIGGEST:
        raise mmfast.MmfastError(f"a message of {len(data):,} bytes; at most {BIGGEST:,}")
    if isinstance(data, bytes):
        return data
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise mmfast.MmfastError("a message that is no JSON") from None


async def _send(socket: WebSocket, events: asyncio.Queue[Any]) -> None:
    while True:
        event, pcm = await events.get()
        await socket.send_text(json.dumps(event))
        if pcm is not None:
            await socket.send_bytes(pcm)


async def _tell(socket: WebSocket, message: str) -> None:
    with contextlib.suppress(RuntimeError, WebSocketDisconnect):
        await socket.send_text(json.dumps({"kind": "error", "text": message}))
