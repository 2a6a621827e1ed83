"""Events of one request as an iterator."""

from __future__ import annotations

import queue
from collections.abc import Iterator

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
