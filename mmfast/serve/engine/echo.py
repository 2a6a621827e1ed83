"""An engine without a model, for trying clients and for tests of everything around engines."""

from __future__ import annotations

import threading
import time

from mmfast.serve.engine.base import (
    BusyError,
    Delta,
    Emit,
    Failure,
    Finish,
    Health,
    Media,
    Reason,
    Request,
)


class Echo:
    """Answers with the words of the last message, one word a token.

    Args:
        pause: Seconds between words.
        limit: Requests at once; one more is refused.
    """

    def __init__(self, pause: float = 0.0, limit: int = 64) -> None:
        self.model, self._pause, self._limit = "echo", pause, limit
        self._lock = threading.Lock()
        self._running: dict[str, threading.Event] = {}

    def submit(self, request: Request, emit: Emit) -> None:
        """See `Executor.submit`."""
        with self._lock:
            if len(self._running) >= self._limit:
                raise BusyError(f"{self._limit} requests run already; try again in a second")
            gone = self._running[request.id] = threading.Event()
        threading.Thread(target=self._answer, args=(request, emit, gone), daemon=True).start()

    def _answer(self, request: Request, emit: Emit, gone: threading.Event) -> None:
        words = [w for part in request.messages[-1].content for w in _words(part)]
        said = words[: request.sampling.max_tokens]
        for i, word in enumerate(said):
            if gone.is_set():
                break
            emit(Delta(" " * (i > 0) + word))
            time.sleep(self._pause)
        with self._lock:
            self._running.pop(request.id, None)
        if gone.is_set():
            emit(Failure("cancelled", 499, "cancelled"))
        else:
            reason: Reason = "stop" if len(said) == len(words) else "length"
            emit(Finish(reason, len(words), len(said)))

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`."""
        with self._lock:
            if request_id in self._running:
                self._running[request_id].set()

    def health(self) -> Health:
        """See `Executor.health`."""
        with self._lock:
            return Health(True, running=len(self._running))

    def close(self) -> None:
        """See `Executor.close`."""
        with self._lock:
            for gone in self._running.values():
                gone.set()


def _words(part: str | Media) -> list[str]:
    return [f"<{part.shot.kind}>"] if isinstance(part, Media) else part.split()
