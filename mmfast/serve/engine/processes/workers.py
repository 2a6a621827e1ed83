"""Roles of worker processes: answer with an engine, or encode media for those that answer."""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mmfast.core.errors import MmfastError
from mmfast.models.prompt import Shot
from mmfast.serve.engine.base import Delta, Event, Executor, Failure, Media, Request
from mmfast.serve.engine.encoder import MediaEncoder, Result, Steps
from mmfast.serve.engine.processes.pool import Maker, Send
from mmfast.serve.engine.slots import Prepared, moved

BEAT = 0.25  # seconds between two messages on the health of an engine
LOST = Failure("the worker that encoded the media was lost", 503, "replica_lost")


class Answering:
    """Answers requests with an `Executor`."""

    def __init__(self, engine: Maker) -> None:
        self._answer_with(engine.make())

    def _answer_with(self, engine: Executor) -> None:
        self._engine = engine
        self._requests: dict[str, str] = {}  # job -> id of its request
        self._over = threading.Event()

    def start(self, send: Send) -> dict[str, Any]:
        """See `Role.start`."""
        self._send = send
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

    def report(self, job: str, event: Event) -> None:
        """Send an event of a request; called from the engine's thread."""
        self._send("event", job, event)

    def _submit(self, job: str, request: Request) -> None:
        def emit(event: Event) -> None:
            self.report(job, event)
            if not isinstance(event, Delta):
                self._requests.pop(job, None)

        self._requests[job] = request.id
        try:
            self._engine.submit(request, emit)
        except MmfastError as error:  # also a BusyError
            self._requests.pop(job, None)
            self._send("refused", job, error)
        else:
            self._send("accepted", job, True)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._send("health", value=self._engine.health())


class Scheduling(Answering):
    """Answers requests with a `Scheduler` whose media other workers encode."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        from mmfast.serve.engine.scheduler import Scheduler

        def make(model: Any, processor: Any, memory: int) -> RemoteEncoder:
            self._encoder = RemoteEncoder(model, processor, memory, self._ask)
            return self._encoder

        self._answer_with(Scheduler(**given, encoder=make))

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
        if kind == "lost":
            self._encoder.resolve(job, LostError(value))
        elif kind in ("encoded", "failed"):
            result = RuntimeError(value) if isinstance(value, str) else value
            self._encoder.resolve(job, result)
        else:
            super().take(kind, job, value)

    def report(self, job: str, event: Event) -> None:
        """Send an event; the failure of an answer whose encoder died is `replica_lost`."""
        name = self._requests.get(job)
        if isinstance(event, Failure) and name in self._encoder.lost:
            self._encoder.lost.discard(name)
            event = LOST
        super().report(job, event)

    def _ask(self, call: str, prepared: Any) -> None:
        self._send("encode", call, prepared)


class Encoding:
    """Encodes media for the workers that answer; `linger` delays results, to test faults."""

    def __init__(
        self,
        model: Any,
        device: str | None,
        dtype: str,
        linger: float = 0.0,
        memory: int = 64 << 20,
    ) -> None:
        from mmfast.models.loading import load
        from mmfast.serve.engine.stages import EncodeStage

        stock, processor = load(model, device, dtype)
        self._stage, self._linger = EncodeStage(MediaEncoder(stock, processor, memory)), linger

    def start(self, send: Send) -> dict[str, Any]:
        """See `Role.start`."""
        self._send = send
        return {}

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
        prepared = moved(value, self._stage.encoder.model.device)
        self._stage.encode(prepared).add_done_callback(partial(self._done, job))

    def close(self) -> None:
        """See `Role.close`."""
        self._stage.close()

    def _done(self, job: str, future: Future[Any]) -> None:
        if self._linger:
            threading.Timer(self._linger, self._report, (job, future)).start()
        else:
            self._report(job, future)

    def _report(self, job: str, future: Future[Any]) -> None:
        error = future.exception()
        if error is None:
            try:
                self._send("encoded", job, future.result())
                return
            except MmfastError as full:  # no room in shared memory
                error = full
        self._send("failed", job, _sendable(error))


def _sendable(error: BaseException) -> Any:
    """Return an error as a value that can be pickled; of other packages, its text."""
    if isinstance(error, MmfastError):
        return error
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


PAUSE = 0.0005  # seconds of one wait for an encoder by an engine without other work


class LostError(RuntimeError):
    """The worker that encoded has died."""


class RemoteEncoder(MediaEncoder):
    """A `MediaEncoder` that prepares prompts here and has media encoded by other workers.

    The engine goes on decoding while it waits. Prompts without media are embedded here. Requests
    are sent by `ask(call, prepared)`, and their results come to `resolve`. `lost` holds the ids of
    requests whose encoder died.
    """

    def __init__(
        self, model: Any, processor: Any, memory: int, ask: Callable[[str, Prepared], None]
    ) -> None:
        super().__init__(model, processor, memory)
        self._ask, self._numbers = ask, itertools.count()
        self._results: dict[str, Result | None] = {}
        self._some = threading.Condition()
        self.lost: set[str] = set()

    def steps(self, batch: Sequence[Prepared]) -> Steps:
        """See `MediaEncoder.steps`; yields None while other workers encode."""
        calls = {self._send(each): i for i, each in enumerate(batch) if each.media}
        here = [i for i, each in enumerate(batch) if not each.media]
        for step in super().steps([batch[i] for i in here]):
            yield None if step is None else (here[step[0]], step[1])
        try:
            while calls:
                found = self._found(calls)
                for call, result in found.items():
                    number = calls.pop(call)
                    if isinstance(result, LostError):
                        self.lost.add(batch[number].request.id)
                    yield number, result
                if not found:
                    yield None
        finally:  # cancelled: late results are not kept
            with self._some:
                for call in calls:
                    self._results.pop(call, None)

    def resolve(self, call: str, result: Result) -> None:
        """Take a result or an error; any thread may call this."""
        with self._some:
            if call in self._results:
                known = isinstance(result, Exception)
                self._results[call] = result if known else moved(result, self.model.device)
                self._some.notify()

    def _send(self, prepared: Prepared) -> str:
        key = "/".join(each.key for mine in prepared.media.values() for each in mine)
        # The name holds the process: results for an earlier worker of this place are not ours.
        call = f"{os.getpid()}-{next(self._numbers)}:{zlib.crc32(key.encode())}"
        with self._some:
            self._results[call] = None
        try:
            self._ask(call, slim(prepared))
        except MmfastError as error:  # no room in shared memory
            self.resolve(call, error)
        return call

    def _found(self, calls: Collection[str]) -> dict[str, Result]:
        """Return the results that have come, after a short wait if there are none."""

        def here() -> dict[str, Result]:
            known = {call: self._results[call] for call in calls}
            return {call: result for call, result in known.items() if result is not None}

        with self._some:
            found = self._some.wait_for(here, PAUSE)
            for call in found:
                del self._results[call]
            return found


def slim(prepared: Prepared) -> Prepared:
    """Drop the original pictures: encoders read the pixels of the processor."""
    empty = np.zeros((0, 0, 3), np.uint8)
    media = {
        kind: tuple(Media(Shot(kind, empty), each.key) for each in mine)
        for kind, mine in prepared.media.items()
    }
    return replace(prepared, request=replace(prepared.request, messages=()), media=media)
