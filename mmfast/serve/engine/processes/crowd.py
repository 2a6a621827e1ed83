"""Requests over worker processes: who answers, who encodes, and what happens when one dies."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.models.loading import EMBEDDED
from mmfast.serve.engine.base import BusyError, Delta, Emit, Event, Failure, Health, Request
from mmfast.serve.engine.processes.crew import Maker, Restarts, WorkerCrew, WorkerPlace, near
from mmfast.serve.engine.processes.messages import SharedMessage, free, unpack
from mmfast.serve.engine.request import LOG, Awaited

ANSWER, ENCODE = "decode", "encode"
ADMIT = 60.0  # seconds for a worker to say whether it takes a request


class Crowd:
    """An `Executor` of worker processes.

    Args:
        model: The name it goes by.
        answer: Makes the role of workers that answer (`roles.Answering`).
        answering: How many there are.
        encode: Makes the role of workers that encode (`roles.Encoding`).
        encoding: How many there are; 0 where those that answer encode, too.
        restarts: How often workers are started again.
        start_seconds: To wait for the workers.

    Raises:
        MmfastError: A role has no worker that starts.
    """

    def __init__(
        self,
        model: str,
        answer: Maker,
        answering: int = 1,
        encode: Maker | None = None,
        encoding: int = 0,
        restarts: Restarts | None = None,
        start_seconds: float = 300.0,
    ) -> None:
        self.model = model
        self._lock, self._jobs = threading.Lock(), itertools.count(1)
        self._streams: dict[str, Awaited] = {}
        self._calls: dict[
            str, tuple[WorkerPlace, str]
        ] = {}  # encoding: who asked, under which name
        self._health: dict[WorkerPlace, Health] = {}
        self._closed = False
        roles = {ANSWER: (answer, answering)}
        if encode is not None and encoding:
            roles[ENCODE] = (encode, encoding)
        self._crew = WorkerCrew(roles, self._hear, self._lose, restarts)
        self._crew.wait(start_seconds)
        for role in roles:
            if not any(place.ready for place in self._crew.of(role)):
                reason = self._crew.of(role)[0].reason or f"not ready in {start_seconds:.0f} s"
                self.close()
                raise MmfastError(f"no worker that can {role} starts: {reason}")

    def submit(self, request: Request, emit: Emit) -> None:
        """See `Executor.submit`."""
        job, stream = self._enter(request, emit)
        try:
            here = stream.place.say("submit", job, request)
        except BaseException:  # no room for its media
            self._drop(job)
            raise
        if not here:
            self._drop(job)
            raise BusyError("a worker was lost just now; try again in a second")
        if not stream.decided.wait(ADMIT):
            self._drop(job)
            stream.place.say("cancel", job)
            raise BusyError(f"no worker took the request in {ADMIT:.0f} s; try again later", ADMIT)
        if isinstance(stream.verdict, Exception):
            raise stream.verdict

    def _enter(self, request: Request, emit: Emit) -> tuple[str, Awaited]:
        with self._crew.changed:
            if self._closed:
                raise BusyError("the engine is closed")
            free_places = [place for place in self._crew.of(ANSWER) if place.ready]
            if not free_places:
                raise BusyError("no worker is ready; it is being started", 2.0)
            place = min(free_places, key=lambda each: len(each.jobs))
            job, stream = f"{next(self._jobs)}", Awaited(request, emit, place)
            with self._lock:
                self._streams[job] = stream
            place.jobs.add(job)
        return job, stream

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`."""
        with self._lock:
            found = [(j, s) for j, s in self._streams.items() if s.request.id == request_id]
        for job, stream in found:
            stream.place.say("cancel", job)

    def health(self) -> Health:
        """See `Executor.health`."""
        with self._lock:
            known = [h for place, h in self._health.items() if place.ready]
            held = len(self._streams)
        gauges: dict[str, float] = {}
        for each in known:
            for name, value in each.gauges.items():
                gauges[name] = gauges.get(name, 0.0) + value
        ready = not self._closed
        for role in {place.role for place in self._crew.places}:
            places = self._crew.of(role)
            gauges[f"workers_{role}"] = float(sum(place.ready for place in places))
            gauges[f"deaths_{role}"] = float(sum(place.total for place in places))
            ready = ready and gauges[f"workers_{role}"] > 0
        waiting = min(held, sum(each.waiting for each in known))
        return Health(ready, held - waiting, waiting, gauges)

    def workers(self, request_id: str) -> dict[str, int]:
        """Process that writes a running answer, by role."""
        with self._lock:
            found = [s.place for s in self._streams.values() if s.request.id == request_id]
        return {place.role: int(place.info["pid"]) for place in found if place.ready}

    def pids(self, role: str) -> list[int]:
        """Processes of a role, those with most to do first."""
        ready = [place for place in self._crew.of(role) if place.ready]
        ready.sort(key=lambda place: -len(place.jobs))
        return [int(place.info["pid"]) for place in ready]

    def close(self) -> None:
        """See `Executor.close`."""
        if self._closed:
            return
        self._closed = True
        self._crew.close()
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end(Failure("the server stops", 503))

    def _hear(self, place: WorkerPlace, kind: str, job: str, packet: SharedMessage) -> None:
        handlers: dict[str, Callable[[WorkerPlace, str, SharedMessage], None]] = {
            "event": self._event,
            "accepted": self._verdict,
            "refused": self._verdict,
            "failed": self._failed,
            "health": self._note,
            "encode": self._ask,
            "encoded": self._told,
        }
        try:
            handlers[kind](place, job, packet)
        except Exception as error:  # one answer fails, and no other one
            LOG.error("what a worker said cannot be handled", exc_info=error)
            free(packet.name)
            self._fail(place, kind, job, type(error).__name__)

    def _fail(self, place: WorkerPlace, kind: str, job: str, reason: str) -> None:
        """Whoever waits for a message that cannot be handled is told."""
        if kind == "encode":
            place.say("failed", job, reason)
        elif place.role == ENCODE:
            place.jobs.discard(job)
            asker, name = self._calls.pop(job, (None, ""))
            if asker is not None:
                asker.say("failed", name, reason)
        elif (stream := self._drop(job)) is not None:
            place.say("cancel", job)
            stream.end(Failure(f"the engine failed on this request ({reason})"))

    def _event(self, place: WorkerPlace, job: str, packet: SharedMessage) -> None:
        event: Event = unpack(packet)
        with self._lock:
            stream = self._streams.get(job)
        if stream is None:
            return
        if not isinstance(event, Delta):
            self._drop(job)
        stream.hear(event)

    def _verdict(self, place: WorkerPlace, job: str, packet: SharedMessage) -> None:
        verdict = unpack(packet)
        with self._lock:
            stream = self._streams.get(job)
        if isinstance(verdict, Exception):
            self._drop(job)
        if stream is not None:
            stream.decide(verdict)

    def _failed(self, place: WorkerPlace, job: str, packet: SharedMessage) -> None:
        """A role raised while it took a message: the one request fails."""
        if place.role == ENCODE:
            self._told(place, job, packet, "failed")
            return
        stream, reason = self._drop(job), unpack(packet)
        if stream is not None:
            stream.end(Failure(f"the engine failed on this request ({reason})"))

    def _note(self, place: WorkerPlace, job: str, packet: SharedMessage) -> None:
        with self._lock:
            self._health[place] = unpack(packet)

    def _ask(self, place: WorkerPlace, job: str, packet: SharedMessage) -> None:
        """An answering worker wants media encoded: on to the encoder with the least to do."""
        with self._crew.changed:
            ready = [each for each in self._crew.of(ENCODE) if each.ready]
            call = f"{next(self._jobs)}"
            if ready:
                encoder = near(ready, job)
                encoder.jobs.add(call)
        if not ready:
            free(packet.name)
            place.say("lost", job, "no encode worker is ready")
            return
        self._calls[call] = place, job
        encoder.forward("encode", call, packet)

    def _told(
        self, place: WorkerPlace, job: str, packet: SharedMessage, kind: str = "encoded"
    ) -> None:
        place.jobs.discard(job)
        asker, name = self._calls.pop(job, (None, ""))
        if asker is None:  # it was failed before
            free(packet.name)
        else:
            asker.forward(kind, name, packet)

    def _lose(self, place: WorkerPlace, jobs: set[str]) -> None:
        with self._lock:
            self._health.pop(place, None)
        for job in jobs:
            if place.role == ENCODE and job in self._calls:
                asker, name = self._calls.pop(job)
                asker.say("lost", name, "the encode worker was lost")
            elif (stream := self._drop(job)) is not None:
                stream.end(Failure("the worker that answered was lost", 503, "replica_lost"))

    def _drop(self, job: str) -> Awaited | None:
        with self._lock:
            stream = self._streams.pop(job, None)
        if stream is not None:
            stream.place.jobs.discard(job)
        return stream


_ROLES = "mmfast.serve.engine.processes.roles"


class Processes(Crowd):
    """Answers requests in worker processes on this machine.

    Workers that encode send embeddings through shared memory to workers that do the rest, each
    with a `Scheduler` of its own. A worker that dies ends the streams on it and is started again.

    Args:
        model: Checkpoint directory, hub id, or None (embedded).
        encode: Workers that encode; 0 lets those that answer encode, too.
        prefill: Prompts are read where answers are written; only 1 is possible.
        decode: Workers that answer, each with `slots` and `queue` of its own.
        threads: Of torch per worker; 0 shares the machine's cores out.
        restarts: How often workers are started again.
        linger: Seconds by which encoders hold back each result: for trials of faults.
        **given: Further arguments of the `Scheduler`.

    Raises:
        MmfastError: A count is not possible, or no worker starts: the model cannot be loaded, or
            a spec is wrong.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        encode: int = 1,
        prefill: int = 1,
        decode: int = 1,
        threads: int = 0,
        restarts: Restarts | None = None,
        linger: float = 0.0,
        **given: Any,
    ) -> None:
        _check(model, encode, prefill, decode)
        threads = threads or max(1, (os.cpu_count() or 1) // (encode + decode))
        given = {"sharing": decode, **given, "model": None if model is None else str(model)}
        whole = Maker("mmfast.serve.engine.scheduler:Scheduler", given)
        answer = (
            Maker(f"{_ROLES}:Scheduling", {"given": given}, threads)
            if encode
            else Maker(f"{_ROLES}:Answering", {"engine": whole}, threads)
        )
        device, dtype = given.get("device"), given.get("dtype", "auto")
        alike = {"model": given["model"], "device": device, "dtype": dtype, "linger": linger}
        encoder = Maker(f"{_ROLES}:Encoding", alike, threads)
        name = given.get("name") or (EMBEDDED if model is None else str(model))
        super().__init__(name, answer, decode, encoder, encode, restarts)


def _check(model: Any, encode: int, prefill: int, decode: int) -> None:
    if isinstance(model, tuple):
        raise MmfastError(
            "worker processes load their model themselves; give a directory or a hub id"
        )
    if prefill != 1:
        raise MmfastError(
            f"prefill={prefill} is not possible with processes, which read prompts where they "
            "answer; give decode more workers, or take the engine 'ray'"
        )
    for name, value, least in (("encode", encode, 0), ("decode", decode, 1)):
        if not isinstance(value, int) or value < least:
            raise MmfastError(f"{name}={value!r} is not allowed; give a number of at least {least}")
