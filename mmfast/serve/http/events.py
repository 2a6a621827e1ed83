"""Server-sent events, and other bodies that come in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mmfast.serve.engine.base import Delta, Event, Executor, Failure, Request
from mmfast.serve.guard.errors import ApiError, busy

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the reply any more."""


class RequestRun:
    """A request that is being answered: `async with Run(executor, request) as run`.

    Leaving before its last event cancels it in the engine, at once.
    """

    def __init__(self, executor: Executor, request: Request) -> None:
        self._executor, self._request = executor, request
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._over = False

    async def __aenter__(self) -> RequestRun:
        """Hand it over.

        Raises:
            BusyError: No room now.
            MmfastError: It can never be answered.
        """
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            if not loop.is_closed():  # an engine may still talk while the server stops
                loop.call_soon_threadsafe(self._inbox.put_nowait, event)

        # reading the prompt takes a while: in a thread, which goes on where this task is cancelled
        handing = asyncio.get_running_loop().run_in_executor(
            None, self._executor.submit, self._request, emit
        )
        try:
            await asyncio.shield(handing)
        except asyncio.CancelledError:
            handing.add_done_callback(self._cancel_late)
            raise
        return self

    def _cancel_late(self, handing: asyncio.Future[None]) -> None:
        if handing.exception() is None:
            self._executor.cancel(self._request.id)

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel what still runs."""
        if not self._over:
            self._over = True
            self._executor.cancel(self._request.id)

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event; None when none came in so many seconds."""
        try:
            event = await asyncio.wait_for(self._inbox.get(), seconds)
        except TimeoutError:
            return None
        self._over = self._over or not isinstance(event, Delta)
        return event


def failed(failure: Failure) -> ApiError:
    """A failure as an error of the API."""
    if failure.status == 499:  # not the client: it would not be there to be told
        return ApiError(503, f"the answer was cut short: {failure.message}", code="cancelled")
    if failure.kind == "busy":
        return busy(failure.message)
    kind = failure.kind if failure.kind.endswith("_error") else ""
    return ApiError(failure.status, failure.message, kind, failure.kind)


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """Work for as long as the client waits for it.

    Raises:
        ClientGoneError: It left; the work was cancelled.
    """
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left(http.receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGoneError
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def left(receive: Any) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment: keeps proxies from closing the connection
EVENTS = "text/event-stream"
# of the OpenAPI document: every event has data, a JSON document or [DONE]
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def event(document: Mapping[str, Any], name: str = "") -> bytes:
    """One event."""
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {data}\n\n".encode("utf-8", "replace")


class StreamedReply(Response):
    """A reply that is sent as it is made, and stops being made when the client leaves.

    Args:
        parts: The pieces.
        media_type: Of the whole.
        close: Called in the end, however it ends, also when nothing was ever sent.
    """

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        media_type: str,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.status_code, self.media_type, self.background = 200, media_type, None
        self._parts, self._close = parts, close
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({writing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._close()
            for task in (writing, leaving):
                task.cancel()
            await asyncio.gather(writing, leaving, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": self.status_code}
        await send({**start, "headers": self.raw_headers})
        async with aclosing(self._parts) as parts:
            async for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
