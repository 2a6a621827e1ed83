"""Requests and fakes for tests of engines."""

from __future__ import annotations

import hashlib
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mmfast.models.prompt import Shot
from mmfast.serve.engine.base import (
    Delta,
    Event,
    Executor,
    Media,
    Message,
    Options,
    Request,
    SamplingOptions,
)

QUESTIONS = (
    "Which way does the shape move?",
    "What color is the shape?",
    "How many shapes are there?",
    "What happens in this clip?",
)


def clip(seed: int, frames: int = 8, side: int = 48) -> Media:
    """Noise that is always the same."""
    pixels = np.random.default_rng(seed).integers(0, 255, (frames, side, side, 3), np.uint8)
    meta = {
        "total_num_frames": frames,
        "fps": 4.0,
        "duration": frames / 4.0,
        "frames_indices": list(range(frames)),
    }
    key = hashlib.sha256(pixels.tobytes()).hexdigest()
    return Media(Shot("video", pixels, meta), key)


def asked(
    name: str,
    of: int = 0,
    tokens: int = 16,
    reduce: str | None = None,
    heat: float = 0.0,
    seed: int | None = 3,
) -> Request:
    """A question about a clip; `of` is the number of both."""
    message = Message("user", (clip(of), QUESTIONS[of % len(QUESTIONS)]))
    sampling = SamplingOptions(tokens, temperature=heat, seed=seed)
    return Request(name, (message,), sampling, Options(reduce=reduce))


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
