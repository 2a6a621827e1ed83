"""What worker processes do: answer with an engine, or encode for those that answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.serve.engine.base import Delta, Event, Executor, Failure, Request
from mmfast.serve.engine.worker import Maker, Say

BEAT = 0.25  # seconds between two words on how an engine is
LOST = Failure("the worker that encoded the media was lost", 503, "replica_lost")


class Answering:
    """Answers requests with an `Executor`.

    Args:
        engine: Makes it.
    """

    def __init__(self, engine: Maker) -> None:
        self._answer_with(engine.make())

    def _answer_with(self, engine: Executor) -> None:
        self._engine = engine
        self._requests: dict[str, str] = {}  # job -> id of its request
        self._over = threading.Event()

    def start(self, say: Say) -> dict[str, Any]:
        """See `Role.start`."""
        self._say = say
        threading.Thread(target=self._beat, daemon=True).start()
        return {"model": self._engine.model}

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
        if kind == "submit":
            self._submit(job, value)
        elif kind == "cancel" and job in self._requests:
            self._engine.cancel(self._requests[job])

    def close(self) -> None:
        """See `Role.close`."""
        self._over.set()
        self._engine.close()

    def said(self, job: str, event: Event) -> None:
        """An event of a request, in the engine's thread."""
        self._say("event", job, event)

    def _submit(self, job: str, request: Request) -> None:
        def emit(event: Event) -> None:
            self.said(job, event)
            if not isinstance(event, Delta):
                self._requests.pop(job, None)

        self._requests[job] = request.id
        try:
            self._engine.submit(request, emit)
        except MmfastError as error:  # BusyError is one, too
            self._requests.pop(job, None)
            self._say("refused", job, error)
        else:
            self._say("accepted", job, True)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._say("health", value=self._engine.health())


class Scheduling(Answering):
    """Answers requests with a `Scheduler` whose media are encoded by other workers.

    Args:
        given: Arguments of the `Scheduler`.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        from mmfast.serve.engine.remote import RemoteEncoder
        from mmfast.serve.engine.scheduler import Scheduler

        def make(model: Any, processor: Any, memory: int) -> RemoteEncoder:
            self._encoder = RemoteEncoder(model, processor, memory, self._ask)
            return self._encoder

        self._answer_with(Scheduler(**given, encoder=make))

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
        from mmfast.serve.engine.remote import LostError

        if kind == "lost":
            self._encoder.told(job, LostError(value))
        elif kind in ("encoded", "failed"):
            result = RuntimeError(value) if isinstance(value, str) else value
            self._encoder.told(job, result)
        else:
            super().take(kind, job, value)

    def said(self, job: str, event: Event) -> None:
        """As of `Answering`; an answer whose encoder died says so."""
        name = self._requests.get(job)
        if isinstance(event, Failure) and name in self._encoder.lost:
            self._encoder.lost.discard(name)
            event = LOST
        super().said(job, event)

    def _ask(self, call: str, prepared: Any) -> None:
        self._say("encode", call, prepared)


class Encoding:
    """Encodes media for those that answer.

    Args:
        model: As of `load`.
        device: As of `load`.
        dtype: As of `load`.
        linger: Seconds by which each result is held back: for trials of faults.
        memory: As of `Encoder`.
    """

    def __init__(
        self,
        model: Any,
        device: str | None,
        dtype: str,
        linger: float = 0.0,
        memory: int = 64 << 20,
    ) -> None:
        from mmfast.models.loading import load
        from mmfast.serve.engine.encoder import Encoder
        from mmfast.serve.engine.gathering import Gathering

        stock, processor = load(model, device, dtype)
        self._gathering, self._linger = Gathering(Encoder(stock, processor, memory)), linger

    def start(self, say: Say) -> dict[str, Any]:
        """See `Role.start`."""
        self._say = say
        return {}

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
        from mmfast.serve.engine.moving import moved

        prepared = moved(value, self._gathering.encoder.model.device)
        self._gathering.encode(prepared).add_done_callback(partial(self._done, job))

    def close(self) -> None:
        """See `Role.close`."""
        self._gathering.close()

    def _done(self, job: str, future: Future[Any]) -> None:
        if self._linger:
            threading.Timer(self._linger, self._told, (job, future)).start()
        else:
            self._told(job, future)

    def _told(self, job: str, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            try:
                self._say("encoded", job, future.result())
                return
            except MmfastError as full:  # no room for it on the way
                error = full
        self._say("failed", job, _sendable(error))


def _sendable(error: BaseException) -> Any:
    """Errors of other packages may not survive being pickled; their text does."""
    if isinstance(error, MmfastError):
        return error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
