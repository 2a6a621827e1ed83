"""One answer over replicas: from encode to prefill to decode, and what is said when one dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmfast.serve.engine.base import Delta, Emit, Event, Failure, Finish, Request

LOG = logging.getLogger("mmfast.serve")
LOST = Failure("the replica that worked on this answer was lost; ask again", 503, "replica_lost")
CANCELLED = Failure("cancelled", 499, "cancelled")


@dataclass(eq=False)
class Stream:
    """A request that somebody waits for.

    Attributes:
        request: The request, its seed set.
        emit: Hears the events.
        workers: Process of each role, once decoding has begun.
        task: Drives it.
    """

    request: Request
    emit: Emit
    workers: Mapping[str, int] = field(default_factory=dict)
    task: Any = None
    began: float = field(default_factory=time.perf_counter)
    first: float = 0.0


async def drive(handles: Mapping[str, Any], stream: Stream, reduce: str | None) -> Event:
    """Emit the pieces of an answer; returns its last event.

    Args:
        handles: Of the deployments, by role.
        stream: The request.
        reduce: Spec string of reducers.
    """
    request = stream.request
    # Handles take each other's answers: what they hold goes from replica to replica.
    embedded = handles["encode"].remote(request, reduce)
    piece = handles["prefill"].remote(embedded, request.sampling.max_tokens)
    chunks = handles["decode"].remote(replace(request, messages=()), piece)
    last: Event | None = None
    try:
        async for chunk in chunks:
            if isinstance(chunk, dict):
                stream.workers = chunk
                continue
            for event in chunk:
                if not isinstance(event, Delta):
                    last = event
                else:
                    stream.first = stream.first or time.perf_counter()
                    stream.emit(event)
    finally:
        if last is None:  # cancelled, or broken: whoever still works on it need not
            for response in (chunks, piece, embedded):
                response.cancel()
    if isinstance(last, Finish):
        first = stream.first or time.perf_counter()
        ttft = (first - stream.began) * 1e3
        return replace(last, trace={**last.trace, "ttft_ms": ttft, "workers": stream.workers})
    return LOST if last is None else last


def failure_of(error: BaseException) -> Failure:
    """What a user is told of an error that Ray raised."""
    from ray import exceptions
    from ray.serve.exceptions import BackPressureError

    gone = (
        exceptions.RayActorError,
        exceptions.ObjectLostError,
        exceptions.WorkerCrashedError,
        exceptions.NodeDiedError,
    )
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, gone):
            return LOST
        if isinstance(cause, BackPressureError):
            return Failure("all replicas are busy; try again in a second", 503)
        if isinstance(cause, exceptions.TaskCancelledError):
            return CANCELLED
        cause = getattr(cause, "cause", None) or cause.__cause__
    LOG.error("a request failed", exc_info=error)  # its text may hold anything, paths too
    return Failure(f"the engine failed on this request ({type(error).__name__})")
