"""Requests and fakes for tests of engines."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

from scheduling import clip, talk

from mmfast.serve.engine.base import Delta, Event, Executor, Request, SamplingOptions

QUESTIONS = (
    "Which way does the shape move?",
    "What color is the shape?",
    "How many shapes are there?",
    "What happens in this clip?",
)


def asked(
    name: str,
    of: int = 0,
    tokens: int = 16,
    reduce: str | None = None,
    heat: float = 0.0,
    seed: int | None = 3,
) -> Request:
    """A question about a clip; `of` is the number of both."""
    question = (clip(of, 8, (48, 48)), QUESTIONS[of % len(QUESTIONS)])
    sampling = SamplingOptions(tokens, temperature=heat, seed=seed)
    return talk(name, [question], sampling=sampling, reduce=reduce)


def eventually(true: Callable[[], Any], seconds: float = 120.0) -> None:
    """Wait for it."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.02)


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


class Inbox(list[Event]):
    """What came of a request."""

    @property
    def text(self) -> str:
        return "".join(each.text for each in self if isinstance(each, Delta))

    @property
    def over(self) -> bool:
        return bool(self) and not isinstance(self[-1], Delta)
