"""Events of one request as an iterator, for threads and for asyncio."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator

from mmfast.serve.engine.base import Delta, Event, Executor, Request


def events(executor: Executor, request: Request) -> Iterator[Event]:
    """Submit, and yield what comes; leaving early cancels.

    Raises:
        BusyError: No room now.
        MmfastError: The request can never be answered.
    """
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    executor.submit(request, inbox.put)
    over = False
    try:
        while not over:
            event = inbox.get()
            over = not isinstance(event, Delta)
            yield event
    finally:
        if not over:
            executor.cancel(request.id)


async def aevents(executor: Executor, request: Request) -> AsyncIterator[Event]:
    """As `events`, in a running event loop; cancelling the task cancels the request."""
    loop = asyncio.get_running_loop()
    inbox: asyncio.Queue[Event] = asyncio.Queue()

    def emit(event: Event) -> None:
        loop.call_soon_threadsafe(inbox.put_nowait, event)

    await asyncio.to_thread(executor.submit, request, emit)
    over = False
    try:
        while not over:
            event = await inbox.get()
            over = not isinstance(event, Delta)
            yield event
    finally:
        if not over:
            executor.cancel(request.id)
