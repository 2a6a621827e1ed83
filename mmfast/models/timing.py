"""Timing of calls on a device: the time to the first token, and the time in the encoder."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Clock = Callable[[], float]


def timed(fn: Callable[[], T], clock: Clock = time.perf_counter) -> tuple[T, float]:
    """Run `fn` and return its result and milliseconds, the device's queue drained on both ends."""
    _drain()
    start = clock()
    result = fn()
    _drain()
    return result, (clock() - start) * 1e3


def _drain() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


class FirstToken:
    """A `generate` streamer that only notes when the first new token arrives."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.at = 0.0
        self._clock = clock
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called with the prompt first, then with every new token."""
        if self._prompt_seen and not self.at:
            _drain()
            self.at = self._clock()
        self._prompt_seen = True

    def end(self) -> None:
        """Called after the last token."""


@dataclass
class Stopwatch:
    """Milliseconds added up."""

    ms: float = 0.0


@contextmanager
def encoder_timer(model: Any) -> Iterator[Stopwatch]:
    """Add up the time spent inside the vision tower."""
    watch, started = Stopwatch(), [0.0]

    def before(*_: Any) -> None:
        started[0] = time.perf_counter()

    def after(*_: Any) -> None:
        _drain()
        watch.ms += (time.perf_counter() - started[0]) * 1e3

    tower = model.get_encoder("image")
    handles = [tower.register_forward_pre_hook(before), tower.register_forward_hook(after)]
    try:
        yield watch
    finally:
        for handle in handles:
            handle.remove()
