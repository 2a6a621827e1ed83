"""One request in the engine, seen from the event loop, and clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request as HttpRequest

from mmfast.serve.engine.base import Delta, Event, Executor, Failure, Request
from mmfast.serve.guard.errors import ApiError, busy

T = TypeVar("T")


class ClientGoneError(Exception):
    """Nobody waits for the reply any more."""


class Run:
    """A request that is being answered: `async with Run(executor, request) as run`.

    Leaving before its last event cancels it in the engine, at once.
    """

    def __init__(self, executor: Executor, request: Request) -> None:
        self._executor, self._request = executor, request
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._over = False

    async def __aenter__(self) -> Run:
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
