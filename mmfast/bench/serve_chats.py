"""What the benchmarks of the engine share: chats that do not end early, and clocks."""

from __future__ import annotations

import itertools
import queue
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmfast.models.loading import load
from mmfast.models.prompt import Shot
from mmfast.serve.engine.base import Delta, Event, Media, Message, Request, SamplingOptions
from mmfast.serve.engine.scheduler import Scheduler

_NUMBERS = itertools.count()


def engine(**options: Any) -> Scheduler:
    """The embedded model on the CPU; its end token is off, for it says no more than a word."""
    model, processor = load(None, "cpu", "float32")
    model.generation_config.eos_token_id = None
    return Scheduler((model, processor), name="tiny-video", **options)


def chat(tokens: int, text: str = "what is it?", image: bool = True, tenant: str = "") -> Request:
    """A question about an image that nobody has seen, or about nothing."""
    number = next(_NUMBERS)
    parts: list[str | Media] = [text]
    if image:
        pixels = np.random.default_rng(number).integers(0, 256, (96, 96, 3), dtype=np.uint8)
        parts.insert(0, Media(Shot("image", pixels), f"image-{number}"))
    message = Message("user", tuple(parts))
    return Request(f"chat-{number}", (message,), SamplingOptions(max_tokens=tokens), tenant=tenant)


class ChatRecord:
    """The events of one request."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        scheduler.submit(request, self._inbox.put)

    def first(self) -> None:
        """Wait for the first event."""
        self._inbox.get()

    def end(self) -> Event:
        """Wait for the last event."""
        while isinstance(event := self._inbox.get(), Delta):
            pass
        return event


@dataclass(frozen=True)
class TimeSpent:
    """Seconds by the clock and of the processor."""

    wall: float
    cpu: float

    @staticmethod
    def now() -> TimeSpent:
        """Both clocks."""
        return TimeSpent(time.perf_counter(), time.process_time())

    def since(self, start: TimeSpent) -> TimeSpent:
        """The difference."""
        return TimeSpent(self.wall - start.wall, self.cpu - start.cpu)


def gap_and_chunk(scheduler: Scheduler, share: float = 0.75) -> tuple[TimeSpent, TimeSpent]:
    """The longest gap between two decoding steps, and the median of whole chunks; of late."""
    batch = scheduler._runner.batch
    assert batch is not None
    gaps = [TimeSpent(*gap) for gap in tuple(batch.gaps)]
    least = share * batch.prefiller.chunk
    chunks = [TimeSpent(*both) for n, *both in tuple(batch.passes) if n >= least]
    return _by(max, gaps), _by(statistics.median, chunks)


def forget(scheduler: Scheduler) -> None:
    """Start counting anew, and let no result be used again."""
    batch = scheduler._runner.batch
    assert batch is not None
    batch.gaps.clear()
    batch.passes.clear()
    batch.prefixes.shrink(0)
    scheduler._runner.encoder.kept.shrink(0)


def _by(how: Any, values: Sequence[TimeSpent]) -> TimeSpent:
    if not values:
        return TimeSpent(float("nan"), float("nan"))
    return TimeSpent(how([v.wall for v in values]), how([v.cpu for v in values]))


def all_ended(heard: Iterable[ChatRecord]) -> list[Event]:
    """The last events of requests."""
    return [each.end() for each in heard]
