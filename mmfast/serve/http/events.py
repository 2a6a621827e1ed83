"""Running requests, and replies that are sent in pieces, such as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mmfast.serve.engine.base import Delta, Event, Executor, Failure, Request
from mmfast.serve.guard.errors import ApiError, busy

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


class RequestRun:
    """A request at the engine: `async with RequestRun(executor, request) as run`.

    Leaving the block before the last event cancels the request in the engine.
    """

    def __init__(self, executor: Executor, request: Request) -> None:
        self._executor, self._request = executor, request
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._over = False

    async def __aenter__(self) -> RequestRun:
        """Submit the request; errors as for `Executor.submit`."""
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            if not loop.is_closed():  # an engine may send events while the server stops
                loop.call_soon_threadsafe(self._inbox.put_nowait, event)

        # preparing the prompt is slow: in a thread, which goes on if this task is cancelled
        submitting = asyncio.get_running_loop().run_in_executor(
            None, self._executor.submit, self._request, emit
        )
        try:
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(self._cancel_late)
            raise
        return self

    def _cancel_late(self, submitting: asyncio.Future[None]) -> None:
        if submitting.exception() is None:
            self._executor.cancel(self._request.id)

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the request if it still runs."""
        if not self._over:
            self._over = True
            self._executor.cancel(self._request.id)

    async def next(self, seconds: float | None = None) -> Event | None:
        """Return the next event; None if none came within the seconds."""
        try:
            event = await asyncio.wait_for(self._inbox.get(), seconds)
        except TimeoutError:
            return None
        self._over = self._over or not isinstance(event, Delta)
        return event


def failed(failure: Failure) -> ApiError:
    """Turn a failure into an error reply."""
    if failure.status == 499:  # cancelled by the server, for the client is still here
        return ApiError(503, f"the answer was cut short: {failure.message}", code="cancelled")
    if failure.kind == "busy":
        return busy(failure.message)
    kind = failure.kind if failure.kind.endswith("_error") else ""
    return ApiError(failure.status, failure.message, kind, failure.kind)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine while the client is connected; it is cancelled when the client leaves."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({doing, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientGoneError
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


DONE = b"data: [DONE]\n\n"
WAITING = b": waiting\n\n"  # a comment that keeps proxies from closing the connection
EVENTS = "text/event-stream"
# for the OpenAPI document: every event has data, a JSON document or [DONE]
EVENT_SCHEMA = {
    "type": "object",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}


def event(document: Mapping[str, Any], name: str = "") -> bytes:
    """Encode one server-sent event."""
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    line = f"event: {name}\n" if name else ""
    return f"{line}data: {data}\n\n".encode("utf-8", "replace")


class StreamedReply(StreamingResponse):
    """A reply that is sent in pieces, and that ends when the client disconnects.

    `close` is called at the end in any case, also if nothing was sent.
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], media_type: str, close: Callable[[], object]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(parts, 200, headers, media_type)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client disconnects."""
        try:
            await while_connected(receive, self.stream_response(send))
        except ClientGoneError:
            return
        finally:
            self._close()
