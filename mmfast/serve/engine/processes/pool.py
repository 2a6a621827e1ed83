"""Worker processes and their parent: start, messages, deaths and restarts."""

from __future__ import annotations

import itertools
import os
import pickle
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import connection, get_all_start_methods, get_context
from multiprocessing.connection import Connection
from typing import Any, Protocol

from mmfast.models.quiet import quiet
from mmfast.serve.engine.base import LOG
from mmfast.serve.engine.processes import PRELOAD
from mmfast.serve.engine.processes.messages import SegmentNames, SharedMessage, free, pack, unpack

Send = Callable[..., None]  # send(kind, job, value): to the parent, from any thread


class Role(Protocol):
    """The work of a worker process; made in the worker, called from its main thread."""

    def start(self, send: Send) -> dict[str, Any]:
        """Begin; the parent receives the return value once."""

    def take(self, kind: str, job: str, value: Any) -> None:
        """Handle a message of the parent; must not block for long."""

    def close(self) -> None:
        """Stop."""


@dataclass(frozen=True)
class Maker:
    """A callable by its name and arguments, so that a worker can make its role."""

    where: str  # `module:callable`
    given: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0  # threads of torch in the worker; 0 leaves the number unchanged

    def make(self) -> Any:
        """Import the callable and call it."""
        module, _, name = self.where.partition(":")
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        return getattr(import_module(module), name)(**self.given)


class Wire:
    """One end of a pipe, written by any thread and read by one.

    Each message carries the number of messages that its sender has taken (opened or freed), so that
    the other end knows the segments of shared memory that it must still free. If the other end is
    gone, sending raises `OSError` and receiving `EOFError`.
    """

    def __init__(self, pipe: Connection, names: SegmentNames) -> None:
        self.pipe, self.taken = pipe, 0
        self._names, self._lock = names, threading.Lock()
        self._open: deque[str] = deque()  # segments that the other end has not taken
        self._acknowledged = 0

    def send(self, kind: str, job: str = "", value: Any = None) -> None:
        """Send a value; its tensors go through shared memory."""
        with self._lock:
            self._send(kind, job, pack(value, self._names))

    def forward(self, kind: str, job: str, packet: SharedMessage) -> None:
        """Send a message of another process on, unopened; it is freed if the other end is gone."""
        with self._lock:
            self._send(kind, job, packet)

    def _send(self, kind: str, job: str, packet: SharedMessage) -> None:
        self._open.append(packet.name)
        try:
            self.pipe.send_bytes(pickle.dumps((self.taken, kind, job, packet), protocol=5))
        except OSError:
            free(self._open.pop())
            raise

    def receive(self) -> tuple[str, str, SharedMessage]:
        """Wait for a message."""
        taken, kind, job, packet = pickle.loads(self.pipe.recv_bytes())
        # Without the lock: a reader that waits for a writer would leave two full pipes full.
        for _ in range(taken - self._acknowledged):
            self._open.popleft()
        self._acknowledged = taken
        return kind, job, packet

    def free(self) -> None:
        """Free the segments that the other end, which is gone, did not take."""
        with self._lock:
            while self._open:
                free(self._open.popleft())


def work(pipe: Connection, prefix: str, maker: Maker) -> None:
    """Run a worker until the parent sends `stop`; exit when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which sends stop
    wire, inbox = Wire(pipe, SegmentNames(prefix)), _Inbox()
    # Reads from the start, to notice a parent that dies while the model is loading.
    threading.Thread(target=_read, args=(wire, inbox), daemon=True).start()
    try:
        quiet()
        role: Role = maker.make()
        info = role.start(wire.send)
    except BaseException as error:
        wire.send("broken", value=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise SystemExit(3) from None
    wire.send("ready", value={**info, "pid": os.getpid()})
    inbox.serve(role, wire)
    role.close()


class _Inbox:
    """Inbox of a worker; also holds the messages that came before the role was made."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, str, SharedMessage]] = []
        self._some = threading.Condition()

    def put(self, message: tuple[str, str, SharedMessage]) -> None:
        with self._some:
            self._waiting.append(message)
            self._some.notify()

    def serve(self, role: Role, wire: Wire) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: bool(self._waiting))
                kind, job, packet = self._waiting.pop(0)
            if kind == "stop":
                return
            _take(role, wire, kind, job, packet)


def _take(role: Role, wire: Wire, kind: str, job: str, packet: SharedMessage) -> None:
    """Handle a message; an error fails one request and no other one."""
    try:
        value = unpack(packet)
        wire.taken += 1
        role.take(kind, job, value)
    except Exception as error:
        LOG.error("a request failed", exc_info=error)  # its text may hold paths
        wire.send("failed", job, type(error).__name__)


def _read(wire: Wire, inbox: _Inbox) -> None:
    try:
        while True:
            inbox.put(wire.receive())
    except (EOFError, OSError):
        os._exit(0)  # the parent is gone


@dataclass(eq=False)
class WorkerSlot:
    """The place of a worker process, which may be replaced."""

    role: str
    number: int
    maker: Maker
    ready: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)  # return value of `Role.start`
    jobs: set[str] = field(default_factory=set)
    deaths: int = 0  # deaths in a row
    total: int = 0  # deaths in all
    reason: str = ""  # error of the last start
    given_up: bool = False  # no further worker is started here
    process: Any = None
    wire: Wire | None = None
    names: SegmentNames = field(default_factory=lambda: SegmentNames(""))  # of the worker
    since: float = 0.0  # time of being ready, or of the next start

    def send(self, kind: str, job: str = "", value: Any = None) -> bool:
        """Send a value to the worker; return False where it is gone."""
        return self._sent(lambda wire: wire.send(kind, job, value))

    def forward(self, kind: str, job: str, packet: SharedMessage) -> bool:
        """Send a packet on to the worker; return False where it is gone."""
        done = self._sent(lambda wire: wire.forward(kind, job, packet))
        if not done:
            free(packet.name)
        return done

    def _sent(self, send: Callable[[Wire], None]) -> bool:
        wire = self.wire
        if wire is None:
            return False
        try:
            send(wire)
        except OSError:
            return False
        return True


def preferred(ready: Sequence[WorkerSlot], call: str) -> WorkerSlot:
    """Return the encoder that had the same media before, unless others are less busy.

    `call` names a call and ends in a hash of its media.
    """
    home = ready[int(call.rpartition(":")[2]) % len(ready)]
    idle = min(ready, key=lambda each: len(each.jobs))
    return home if len(home.jobs) <= len(idle.jobs) + 1 else idle


AHEAD = 16  # segments that a worker may have made since its last message


@dataclass(frozen=True)
class Restarts:
    """Limits of restarting a worker."""

    most: int = 5  # deaths in a row after which its place stays empty
    first: float = 0.25  # seconds before the first restart, doubled each time
    longest: float = 30.0  # most seconds between two starts
    steady: float = 30.0  # seconds of work after which earlier deaths are forgotten

    def pause(self, deaths: int) -> float:
        """Return the seconds to wait after a number of deaths in a row."""
        return float(min(self.longest, self.first * 2 ** (deaths - 1)))


def _context() -> Any:
    """Return a context whose processes are forked from a server that only imports, or spawned."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    return context


Receive = Callable[[WorkerSlot, str, str, SharedMessage], None]
Lost = Callable[[WorkerSlot, set[str]], None]


class WorkerPool:
    """Starts workers, receives their messages, and restarts those that die.

    `receive` takes messages, `lost` the place of a dead worker with the jobs it had. Both are
    called from one thread, in order: all messages that a worker sent before it died come before the
    call of `lost`.
    """

    def __init__(
        self,
        roles: Mapping[str, tuple[Maker, int]],
        receive: Receive,
        lost: Lost,
        restarts: Restarts | None = None,
    ) -> None:
        self._handle, self._lost, self.restarts = receive, lost, restarts or Restarts()
        self._prefix = f"mmfast-{os.getpid()}-{secrets.token_hex(3)}"
        self._counter = itertools.count()
        self._context = _context()
        self.places = [
            WorkerSlot(role, i, maker) for role, (maker, n) in roles.items() for i in range(n)
        ]
        self.changed = threading.Condition()
        self._closed = False
        self._woken, self._wake = self._context.Pipe(duplex=False)
        for place in self.places:
            self._start(place)
        self._thread = threading.Thread(target=self._run, name="mmfast-workers", daemon=True)
        self._thread.start()

    def of(self, role: str) -> list[WorkerSlot]:
        """Return the places of a role."""
        return [place for place in self.places if place.role == role]

    def wait(self, seconds: float) -> bool:
        """Wait until all workers are ready or failed to start; return False after the time."""

        def settled() -> bool:
            return all(place.ready or place.reason for place in self.places)

        with self.changed:
            return self.changed.wait_for(settled, seconds)

    def close(self, seconds: float = 5.0) -> None:
        """Stop all workers; those that do not stop in time are killed."""
        self._closed = True
        self._wake.send_bytes(b"x")
        self._thread.join()
        for place in self.places:
            place.send("stop")
        until = time.monotonic() + seconds
        for place in self.places:
            if place.process is not None:
                place.process.join(max(0.0, until - time.monotonic()))
                place.process.kill()
                place.process.join()
            self._clean(place)
        self._woken.close()
        self._wake.close()

    def _start(self, place: WorkerSlot) -> None:
        mine, its = self._context.Pipe()
        number = next(self._counter)
        place.names = SegmentNames(f"{self._prefix}-{number}w")
        place.wire = Wire(mine, SegmentNames(f"{self._prefix}-{number}p"))
        process = self._context.Process(
            target=work,
            args=(its, place.names.prefix, place.maker),
            name=f"mmfast-{place.role}-{place.number}",
            daemon=True,
        )
        process.start()
        place.process = process
        its.close()  # only the worker holds its end, so its death closes the pipe

    def _run(self) -> None:
        while not self._closed:
            alive = {p.wire.pipe: p for p in self.places if p.wire is not None}
            due = [p.since for p in self.places if p.wire is None and not p.given_up]
            pause = max(0.0, min(due) - time.monotonic()) if due else None
            for pipe in connection.wait([self._woken, *alive], pause):
                if pipe in alive:
                    self._read(alive[pipe])
            for place in self.places:
                if place.wire is None and not place.given_up and place.since <= time.monotonic():
                    self._restart(place)

    def _restart(self, place: WorkerSlot) -> None:
        """Start a worker; a failure, such as no free memory, counts as a death."""
        try:
            self._start(place)
        except Exception as error:
            LOG.error("a worker cannot be started", exc_info=error)
            with self.changed:
                self._count(place, f"{type(error).__name__}: {error}")
                self._clean(place)

    def _read(self, place: WorkerSlot) -> None:
        wire = place.wire
        assert wire is not None
        try:
            kind, job, packet = wire.receive()
        except Exception as error:
            if not isinstance(error, EOFError | OSError):  # the stream of messages is broken
                LOG.error(
                    "the message of a worker cannot be read, and the worker is ended",
                    exc_info=error,
                )
            self._bury(place)
            return
        wire.taken += 1  # from here on this process must open, forward or free the packet
        if packet.name:
            place.names.count = max(place.names.count, int(packet.name.rpartition("-")[2]))
        try:
            if kind in ("ready", "broken"):
                self._settle(place, kind == "ready", unpack(packet))
            else:
                self._handle(place, kind, job, packet)
        except Exception:  # of one message: the others still need this thread
            LOG.exception("the message of a worker is lost")
            free(packet.name)

    def _settle(self, place: WorkerSlot, ready: bool, info: Any) -> None:
        with self.changed:
            place.ready = ready
            place.info, place.reason = (info, "") if ready else ({}, info)
            place.since = time.monotonic()
            self.changed.notify_all()

    def _bury(self, place: WorkerSlot) -> None:
        """Clean up after a worker that is gone, report its jobs, and plan the next worker."""
        process = place.process
        assert process is not None
        process.join(1.0)
        process.kill()  # it has closed its pipe and is of no use
        process.join()
        with self.changed:
            self._count(place, f"exit code {process.exitcode}")
            jobs, place.jobs = place.jobs, set()
            self._clean(place)
        try:
            self._lost(place, jobs)
        except Exception:
            LOG.exception("the answers of a worker that is lost cannot be ended")

    def _count(self, place: WorkerSlot, reason: str) -> None:
        now = time.monotonic()
        place.total += 1
        steady = place.ready and now - place.since > self.restarts.steady
        place.deaths = 1 if steady else place.deaths + 1
        place.reason = place.reason or reason
        place.given_up = place.deaths > self.restarts.most
        place.since = now + self.restarts.pause(place.deaths)
        place.ready = False
        self.changed.notify_all()

    def _clean(self, place: WorkerSlot) -> None:
        if place.wire is not None:
            place.wire.pipe.close()
            place.wire.free()
            place.wire = None
        last = place.names.count
        for number in range(last + 1, last + 1 + AHEAD):
            free(f"{place.names.prefix}-{number}")
