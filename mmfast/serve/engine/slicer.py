"""A call of the vision tower in slices: between two of its blocks others may work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T")


class _Stop(BaseException):
    """Nobody wants the result any more."""


class Slicer:
    """Runs calls in a thread that works only while its owner waits for it.

    So there are never two at work on the model, and a call of any family stops wherever a block
    of its tower begins.

    Attributes:
        budget: Seconds after which a call stops at the next block; None never stops it.
        longest: Seconds of the longest slice of the last call.
        total: Seconds of all slices of the last call.
        worked: Processor seconds of the thread so far.
    """

    def __init__(self) -> None:
        self.budget: float | None = None
        self.longest = self.total = self.worked = 0.0
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._call: Callable[[], Any] | None = None
        self._result: tuple[bool, Any] | None = None
        self._stopping = False
        self._since = 0.0
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], T], blocks: nn.ModuleList) -> Generator[None, None, T]:
        """Yields where `call` stops at a block; its value is that of the call."""
        self._call, self._result = call, None
        self.longest = self.total = 0.0
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="mmfast-tower", daemon=True)
            self._thread.start()
        with self._stops(blocks):
            try:
                while not self._resumed():
                    yield
            except GeneratorExit:
                self._stopping = True
                self._resumed()
                self._stopping, self._result = False, None  # its frames hold the call's memory
                raise
        found: T = self._value()
        return found

    def close(self) -> None:
        """End the thread; no call may be at work."""
        if self._thread is not None:
            self._call = None
            self._go.release()
            self._thread.join()
            self._thread = None

    def _value(self) -> Any:
        """What the call returned; or raises what it raised."""
        assert self._result is not None
        (fine, value), self._result = self._result, None
        if not fine:
            raise value
        return value

    def _resumed(self) -> bool:
        """Let the call work until it stops; whether it is through."""
        self._since = time.perf_counter()
        self._go.release()
        self._back.acquire()
        took = time.perf_counter() - self._since
        self.longest, self.total = max(self.longest, took), self.total + took
        return self._result is not None

    @contextmanager
    def _stops(self, blocks: nn.ModuleList) -> Iterator[None]:
        handles = [block.register_forward_pre_hook(self._before) for block in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, *_: Any) -> None:
        if threading.current_thread() is not self._thread or self.budget is None:
            return
        if time.perf_counter() - self._since >= self.budget:
            self.worked = time.thread_time()
            self._back.release()
            self._go.acquire()
            if self._stopping:
                raise _Stop

    def _work(self) -> None:
        while True:
            self._go.acquire()
            if self._call is None:
                return
            try:
                self._result = True, self._call()
            except BaseException as error:
                self._result = False, error
            self._call, self.worked = None, time.thread_time()
            self._back.release()
