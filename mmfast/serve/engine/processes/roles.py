"""What worker processes do: answer with an engine, or encode for those that answer."""

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
from mmfast.serve.engine.processes.crew import Maker, Say
from mmfast.serve.engine.slots import Prepared, moved

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
        from mmfast.serve.engine.scheduler import Scheduler

        def make(model: Any, processor: Any, memory: int) -> RemoteEncoder:
            self._encoder = RemoteEncoder(model, processor, memory, self._ask)
            return self._encoder

        self._answer_with(Scheduler(**given, encoder=make))

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
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
        from mmfast.serve.engine.encoder import MediaEncoder
        from mmfast.serve.engine.services import Gathering

        stock, processor = load(model, device, dtype)
        self._gathering, self._linger = Gathering(MediaEncoder(stock, processor, memory)), linger

    def start(self, say: Say) -> dict[str, Any]:
        """See `Role.start`."""
        self._say = say
        return {}

    def take(self, kind: str, job: str, value: Any) -> None:
        """See `Role.take`."""
        from mmfast.serve.engine.slots import moved

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


PAUSE = 0.0005  # seconds that an engine with nothing else to do waits for an encoder at a time


class LostError(RuntimeError):
    """The worker that encoded is gone."""


class RemoteEncoder(MediaEncoder):
    """An `Encoder` that writes prompts here and has media encoded elsewhere.

    While it waits, the engine goes on decoding. Prompts without media are embedded here.

    Args:
        model: As of `Encoder`.
        processor: As of `Encoder`.
        memory: As of `Encoder`.
        ask: `ask(call, prepared)` sends a request off; its result comes to `told`.

    Attributes:
        lost: Ids of requests whose encoder died.
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
        """See `Encoder.steps`; it pauses while others encode."""
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
        finally:  # nobody waits any more: what still comes is not kept
            with self._some:
                for call in calls:
                    self._results.pop(call, None)

    def told(self, call: str, result: Result) -> None:
        """A result, or why there is none; of any thread."""
        with self._some:
            if call in self._results:
                known = isinstance(result, Exception)
                self._results[call] = result if known else moved(result, self.model.device)
                self._some.notify()

    def _send(self, prepared: Prepared) -> str:
        key = "/".join(each.key for mine in prepared.media.values() for each in mine)
        # The process is part of the name: what another one of the same place asked for is not ours.
        call = f"{os.getpid()}-{next(self._numbers)}:{zlib.crc32(key.encode())}"
        with self._some:
            self._results[call] = None
        try:
            self._ask(call, slim(prepared))
        except MmfastError as error:  # no room for it on the way
            self.told(call, error)
        return call

    def _found(self, calls: Collection[str]) -> dict[str, Result]:
        """Results that are here, if need be after a short wait."""

        def here() -> dict[str, Result]:
            known = {call: self._results[call] for call in calls}
            return {call: result for call, result in known.items() if result is not None}

        with self._some:
            found = self._some.wait_for(here, PAUSE)
            for call in found:
                del self._results[call]
            return found


def slim(prepared: Prepared) -> Prepared:
    """The same without the pictures as they came: encoders read the processor's pixels."""
    media = {
        kind: tuple(Media(_hollow(each.shot), each.key) for each in mine)
        for kind, mine in prepared.media.items()
    }
    return replace(prepared, request=replace(prepared.request, messages=()), media=media)


def _hollow(shot: Shot) -> Shot:
    return Shot(shot.kind, np.zeros((0, 0, 3), np.uint8))
