"""Running requests, and replies that are sent in pieces, such as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from mmfast.serve.engine.base import Delta, Event, Executor, Failure, Request
from mmfast.serve.guard.errors import ApiError, busy

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client has closed the connection."""


class RequestRun:
    """Requests at the engine: `async with RequestRun(executor, requests) as run`.

    Leaving the block before the last events cancels the requests that still run.
    """

    def __init__(self, executor: Executor, requests: Sequence[Request]) -> None:
        self._executor, self._requests = executor, requests
        self._inbox: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._open: set[int] = set()

    async def __aenter__(self) -> RequestRun:
        """Submit the requests; errors as for `Executor.submit`."""
        loop = asyncio.get_running_loop()

        def emit(number: int, event: Event) -> None:
            if not loop.is_closed():  # an engine may send events while the server stops
                loop.call_soon_threadsafe(self._inbox.put_nowait, (number, event))

        try:
            for number, request in enumerate(self._requests):
                # preparing the prompt is slow: in a thread, which goes on if this task is cancelled
                submitting = loop.run_in_executor(
                    None, self._executor.submit, request, partial(emit, number)
                )
                try:
                    await asyncio.shield(submitting)
                except asyncio.CancelledError:
                    submitting.add_done_callback(partial(self._cancel_late, request))
                    raise
                self._open.add(number)
        except BaseException:
            self.close()
            raise
        return self

    def _cancel_late(self, request: Request, submitting: asyncio.Future[None]) -> None:
        if submitting.exception() is None:
            self._executor.cancel(request.id)

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the requests that still run."""
        while self._open:
            self._executor.cancel(self._requests[self._open.pop()].id)

    async def next(self, seconds: float | None = None) -> tuple[int, Event] | None:
        """Return the next event and the number of its request; None if none came in time."""
        try:
            # wait_for of Python 3.11 forgets a cancel that comes together with an event
            async with asyncio.timeout(seconds):
                number, event = await self._inbox.get()
        except TimeoutError:
            return None
        if not isinstance(event, Delta):
            self._open.discard(number)
        return number, event


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
        self,
        parts: AsyncGenerator[bytes, None],
        media_type: str,
        close: Callable[[], object],
        more: Mapping[str, str] | None = None,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **(more or {})}
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
