"""The engine of worker processes: assigns requests, passes messages on, handles deaths."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.errors import MmfastError
from mmfast.models.loading import EMBEDDED
from mmfast.serve.engine.base import (
    LOG,
    STOPPED,
    BusyError,
    Delta,
    Emit,
    Event,
    Failure,
    Health,
    Request,
)
from mmfast.serve.engine.processes.messages import SharedMessage, free, unpack
from mmfast.serve.engine.processes.pool import Maker, Restarts, WorkerPool, WorkerSlot, preferred

ANSWER, ENCODE = "decode", "encode"
ADMIT = 60.0  # seconds for a worker to accept or refuse a request


@dataclass(eq=False)
class _Stream:
    """A request at a worker.

    `verdict` is None until the worker has decided, then True or the refusal.
    """

    request: Request
    emit: Emit
    place: WorkerSlot
    verdict: Exception | bool | None = None
    decided: threading.Event = field(default_factory=threading.Event)

    def decide(self, verdict: Exception | bool) -> None:
        """Note the first verdict."""
        if not self.decided.is_set():
            self.verdict = verdict
            self.decided.set()

    def send(self, event: Event) -> None:
        """Pass an event on; a worker that sends one has accepted the request."""
        self.decide(True)
        try:
            self.emit(event)
        except Exception:  # the other requests still need this thread
            LOG.exception("an event of request %s cannot be delivered", self.request.id)

    def end(self, failure: Failure) -> None:
        """Fail the answer, or refuse the request if no worker had accepted it."""
        if self.decided.is_set():
            self.send(failure)
        else:
            self.decide(BusyError(f"{failure.message}; try again in a second"))


class WorkerEngine:
    """An `Executor` of worker processes; raises `MmfastError` if a role has none that starts.

    Without workers that encode, those that answer encode, too. `start_seconds` is the longest wait
    for the workers.
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
        self._streams: dict[str, _Stream] = {}
        self._calls: dict[str, tuple[WorkerSlot, str]] = {}  # encoding: caller, and its job
        self._health: dict[WorkerSlot, Health] = {}
        self._closed = False
        roles = {ANSWER: (answer, answering)}
        if encode is not None and encoding:
            roles[ENCODE] = (encode, encoding)
        self._pool = WorkerPool(roles, self._receive, self._lose, restarts)
        self._pool.wait(start_seconds)
        for role in roles:
            if not any(place.ready for place in self._pool.of(role)):
                reason = self._pool.of(role)[0].reason or f"not ready in {start_seconds:.0f} s"
                self.close()
                raise MmfastError(f"no worker that can {role} starts: {reason}")

    def submit(self, request: Request, emit: Emit) -> None:
        """See `Executor.submit`."""
        job, stream = self._enter(request, emit)
        try:
            sent = stream.place.send("submit", job, request)
        except BaseException:  # no room for its media
            self._drop(job)
            raise
        if not sent:
            self._drop(job)
            raise BusyError("a worker was lost just now; try again in a second")
        if not stream.decided.wait(ADMIT):
            self._drop(job)
            stream.place.send("cancel", job)
            raise BusyError(f"no worker took the request in {ADMIT:.0f} s; try again later", ADMIT)
        if isinstance(stream.verdict, Exception):
            raise stream.verdict

    def _enter(self, request: Request, emit: Emit) -> tuple[str, _Stream]:
        with self._pool.changed:
            if self._closed:
                raise BusyError("the engine is closed")
            ready = [place for place in self._pool.of(ANSWER) if place.ready]
            if not ready:
                raise BusyError("no worker is ready; it is being started", 2.0)
            place = min(ready, key=lambda each: len(each.jobs))
            job, stream = f"{next(self._jobs)}", _Stream(request, emit, place)
            with self._lock:
                self._streams[job] = stream
            place.jobs.add(job)
        return job, stream

    def cancel(self, request_id: str) -> None:
        """See `Executor.cancel`."""
        for job, stream in self._of(request_id):
            stream.place.send("cancel", job)

    def _of(self, request_id: str) -> list[tuple[str, _Stream]]:
        with self._lock:
            return [(j, s) for j, s in self._streams.items() if s.request.id == request_id]

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
        for role in {place.role for place in self._pool.places}:
            places = self._pool.of(role)
            gauges[f"workers_{role}"] = float(sum(place.ready for place in places))
            gauges[f"deaths_{role}"] = float(sum(place.total for place in places))
            ready = ready and gauges[f"workers_{role}"] > 0
        waiting = min(held, sum(each.waiting for each in known))
        return Health(ready, held - waiting, waiting, gauges)

    def workers(self, request_id: str) -> dict[str, int]:
        """Return the process that decodes a running answer, by role."""
        found = [stream.place for _, stream in self._of(request_id)]
        return {place.role: int(place.info["pid"]) for place in found if place.ready}

    def pids(self, role: str) -> list[int]:
        """Return the processes of a role, the busiest first."""
        ready = [place for place in self._pool.of(role) if place.ready]
        ready.sort(key=lambda place: -len(place.jobs))
        return [int(place.info["pid"]) for place in ready]

    def close(self) -> None:
        """See `Executor.close`."""
        if self._closed:
            return
        self._closed = True
        self._pool.close()
        with self._lock:
            streams, self._streams = list(self._streams.values()), {}
        for stream in streams:
            stream.end(STOPPED)

    # --- messages of workers ------------------------------------------------------------------

    def _receive(self, place: WorkerSlot, kind: str, job: str, packet: SharedMessage) -> None:
        handlers: dict[str, Callable[[WorkerSlot, str, SharedMessage], None]] = {
            "event": self._event,
            "accepted": self._verdict,
            "refused": self._verdict,
            "failed": self._failed,
            "health": self._note_health,
            "encode": self._forward_call,
            "encoded": self._forward_result,
        }
        try:
            handlers[kind](place, job, packet)
        except Exception as error:  # one answer fails, and no other one
            LOG.error("a message of a worker cannot be handled", exc_info=error)
            free(packet.name)
            self._fail(place, kind, job, type(error).__name__)

    def _fail(self, place: WorkerSlot, kind: str, job: str, reason: str) -> None:
        if kind == "encode":
            place.send("failed", job, reason)
        elif place.role == ENCODE:
            place.jobs.discard(job)
            caller, name = self._calls.pop(job, (None, ""))
            if caller is not None:
                caller.send("failed", name, reason)
        elif (stream := self._drop(job)) is not None:
            place.send("cancel", job)
            stream.end(Failure(f"the engine failed on this request ({reason})"))

    def _event(self, place: WorkerSlot, job: str, packet: SharedMessage) -> None:
        event: Event = unpack(packet)
        with self._lock:
            stream = self._streams.get(job)
        if stream is None:
            return
        if not isinstance(event, Delta):
            self._drop(job)
        stream.send(event)

    def _verdict(self, place: WorkerSlot, job: str, packet: SharedMessage) -> None:
        verdict = unpack(packet)
        with self._lock:
            stream = self._streams.get(job)
        if isinstance(verdict, Exception):
            self._drop(job)
        if stream is not None:
            stream.decide(verdict)

    def _failed(self, place: WorkerSlot, job: str, packet: SharedMessage) -> None:
        """Fail the one request whose message made a worker raise."""
        if place.role == ENCODE:
            self._forward_result(place, job, packet, "failed")
            return
        stream, reason = self._drop(job), unpack(packet)
        if stream is not None:
            stream.end(Failure(f"the engine failed on this request ({reason})"))

    def _note_health(self, place: WorkerSlot, job: str, packet: SharedMessage) -> None:
        with self._lock:
            self._health[place] = unpack(packet)

    def _forward_call(self, place: WorkerSlot, job: str, packet: SharedMessage) -> None:
        """Send the media of an answering worker to an encoder."""
        with self._pool.changed:
            ready = [each for each in self._pool.of(ENCODE) if each.ready]
            call = f"{next(self._jobs)}"
            if ready:
                encoder = preferred(ready, job)
                encoder.jobs.add(call)
        if not ready:
            free(packet.name)
            place.send("lost", job, "no encode worker is ready")
            return
        self._calls[call] = place, job
        encoder.forward("encode", call, packet)

    def _forward_result(
        self, place: WorkerSlot, job: str, packet: SharedMessage, kind: str = "encoded"
    ) -> None:
        place.jobs.discard(job)
        caller, name = self._calls.pop(job, (None, ""))
        if caller is None:  # the call has failed before
            free(packet.name)
        else:
            caller.forward(kind, name, packet)

    def _lose(self, place: WorkerSlot, jobs: set[str]) -> None:
        with self._lock:
            self._health.pop(place, None)
        for job in jobs:
            if place.role == ENCODE and job in self._calls:
                caller, name = self._calls.pop(job)
                caller.send("lost", name, "the encode worker was lost")
            elif (stream := self._drop(job)) is not None:
                stream.end(Failure("the worker that answered was lost", 503, "replica_lost"))

    def _drop(self, job: str) -> _Stream | None:
        with self._lock:
            stream = self._streams.pop(job, None)
        if stream is not None:
            stream.place.jobs.discard(job)
        return stream


_ROLES = "mmfast.serve.engine.processes.workers"


def process_engine(
    model: str | None = None,
    *,
    encode: int = 1,
    prefill: int = 1,
    decode: int = 1,
    threads: int = 0,
    restarts: Restarts | None = None,
    linger: float = 0.0,
    **given: Any,
) -> WorkerEngine:
    """Start an engine of worker processes on this machine.

    Workers that encode send embeddings through shared memory to workers that do the rest, each with
    a `Scheduler` that has its own `slots` and `queue`. A worker that dies ends the streams on it
    and is restarted.

    With `encode=0`, those that answer encode, too. `prefill` can only be 1: the workers that decode
    read the prompts. Each worker has `threads` threads of torch; 0 divides the cores of the
    machine. `linger` delays each result of an encoder by that many seconds, to test faults.
    """
    _check(model, encode, prefill, decode)
    threads = threads or max(1, (os.cpu_count() or 1) // (encode + decode))
    given = {"sharing": decode, **given, "model": None if model is None else str(model)}
    whole = Maker("mmfast.serve.engine.scheduler:Scheduler", given)
    answer = (
        Maker(f"{_ROLES}:Scheduling", {"given": given}, threads)
        if encode
        else Maker(f"{_ROLES}:Answering", {"engine": whole}, threads)
    )
    loaded = {"model": given["model"], "device": given.get("device")}
    loaded |= {"dtype": given.get("dtype", "auto"), "linger": linger}
    encoder = Maker(f"{_ROLES}:Encoding", loaded, threads)
    name = given.get("name") or (EMBEDDED if model is None else str(model))
    return WorkerEngine(name, answer, decode, encoder, encode, restarts)


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
