"""Worker processes as their parent sees them: started, listened to, missed, started again."""

from __future__ import annotations

import itertools
import logging
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
from mmfast.serve.engine.processes.messages import SegmentNames, SharedMessage, free, pack, unpack

Say = Callable[..., None]  # say(kind, job, value): to the parent, from any thread


class Role(Protocol):
    """What a worker does; made in the worker, called from its reading thread."""

    def start(self, say: Say) -> dict[str, Any]:
        """Begin; what is returned the parent gets to know once."""

    def take(self, kind: str, job: str, value: Any) -> None:
        """A message of the parent; must not block for long."""

    def close(self) -> None:
        """Stop."""


@dataclass(frozen=True)
class Maker:
    """How a worker makes its role: a callable by its name, so that it can be sent.

    Attributes:
        where: `module:callable`.
        given: Its keyword arguments.
        threads: Threads of torch in the worker; 0 leaves them.
    """

    where: str
    given: Mapping[str, Any] = field(default_factory=dict)
    threads: int = 0

    def make(self) -> Any:
        """Import and call."""
        module, _, name = self.where.partition(":")
        if self.threads:
            import torch

            torch.set_num_threads(self.threads)
        return getattr(import_module(module), name)(**self.given)


class Wire:
    """One end of a pipe, written to from any thread and read by one.

    Each message tells how many messages its sender has taken, so that the other end knows whose
    shared memory is still its own to free.

    Attributes:
        taken: Messages that this end has taken; whoever opens or frees them counts them.
    """

    def __init__(self, pipe: Connection, names: SegmentNames) -> None:
        self.pipe, self.taken = pipe, 0
        self._names, self._lock = names, threading.Lock()
        self._open: deque[str] = deque()  # segments of messages that the other end has not taken
        self._told = 0

    def say(self, kind: str, job: str = "", value: Any = None) -> None:
        """Send a value; what it holds in tensors goes through shared memory.

        Raises:
            OSError: The other end is gone.
        """
        with self._lock:
            self._send(kind, job, pack(value, self._names))

    def forward(self, kind: str, job: str, packet: SharedMessage) -> None:
        """Send on what came from another process, unopened.

        Raises:
            OSError: The other end is gone; the packet is freed.
        """
        with self._lock:
            self._send(kind, job, packet)

    def _send(self, kind: str, job: str, packet: SharedMessage) -> None:
        self._open.append(packet.name)
        try:
            self.pipe.send_bytes(pickle.dumps((self.taken, kind, job, packet), protocol=5))
        except OSError:
            free(self._open.pop())
            raise

    def hear(self) -> tuple[str, str, SharedMessage]:
        """Wait for a message.

        Raises:
            EOFError: The other end is gone.
        """
        told, kind, job, packet = pickle.loads(self.pipe.recv_bytes())
        # Without the lock: who reads must never wait for who writes, or two full pipes stay full.
        for _ in range(told - self._told):
            self._open.popleft()
        self._told = told
        return kind, job, packet

    def free(self) -> None:
        """Free what the other end, which is gone, did not take, and what it was about to send."""
        with self._lock:
            while self._open:
                free(self._open.popleft())


def work(pipe: Connection, prefix: str, maker: Maker) -> None:
    """Main function of a worker; returns when told to stop, exits when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which says stop
    wire, box = Wire(pipe, SegmentNames(prefix)), _Box()
    # Reads from the beginning: a parent that dies while the model is loading is noticed, too.
    threading.Thread(target=_read, args=(wire, box), daemon=True).start()
    try:
        quiet()
        role: Role = maker.make()
        said = role.start(wire.say)
    except BaseException as error:
        wire.say("broken", value=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
        raise SystemExit(3) from None
    wire.say("ready", value={**said, "pid": os.getpid()})
    box.serve(role, wire)
    role.close()


class _Box:
    """Messages that came before the role was there, then the role itself."""

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
    """One request that fails harms no other one."""
    try:
        value = unpack(packet)
        wire.taken += 1
        role.take(kind, job, value)
    except Exception as error:
        LOG.error("a request failed", exc_info=error)  # its text may hold anything, paths too
        wire.say("failed", job, type(error).__name__)


def _read(wire: Wire, box: _Box) -> None:
    try:
        while True:
            box.put(wire.hear())
    except (EOFError, OSError):
        os._exit(0)  # nobody is left to work for


@dataclass(eq=False)
class WorkerPlace:
    """The place of a worker; who works there may change.

    Attributes:
        role: What is done there.
        number: Counts the places of a role.
        ready: Whether the worker takes jobs.
        info: What the worker said of itself.
        jobs: What it works on.
        deaths: In a row.
        total: Deaths in all.
        reason: Why the last one did not start.
        given_up: Nobody is started here any more.
    """

    role: str
    number: int
    maker: Maker
    ready: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    jobs: set[str] = field(default_factory=set)
    deaths: int = 0
    total: int = 0
    reason: str = ""
    given_up: bool = False
    process: Any = None
    wire: Wire | None = None
    names: SegmentNames = field(
        default_factory=lambda: SegmentNames("")
    )  # of what the worker makes
    since: float = 0.0  # ready, or when to start again

    def say(self, kind: str, job: str = "", value: Any = None) -> bool:
        """Send a value to the worker; False where it is gone."""
        return self._sent(lambda wire: wire.say(kind, job, value))

    def forward(self, kind: str, job: str, packet: SharedMessage) -> bool:
        """Send a packet on to the worker; False where it is gone."""
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


def near(ready: Sequence[WorkerPlace], call: str) -> WorkerPlace:
    """The encoder that had the same media before, unless others have less to do.

    Args:
        ready: Encoders.
        call: Ends in a number that stands for the media.
    """
    home = ready[int(call.rpartition(":")[2]) % len(ready)]
    idle = min(ready, key=lambda each: len(each.jobs))
    return home if len(home.jobs) <= len(idle.jobs) + 1 else idle


LOG = logging.getLogger("mmfast.serve")
AHEAD = 16  # segments that a worker can have made since it last sent one


@dataclass(frozen=True)
class Restarts:
    """How often a worker is started again.

    Attributes:
        most: Deaths in a row after which its place stays empty.
        first: Seconds before the first new start, doubled each time.
        longest: Seconds between two starts, at most.
        steady: Seconds of work after which earlier deaths are forgotten.
    """

    most: int = 5
    first: float = 0.25
    longest: float = 30.0
    steady: float = 30.0

    def pause(self, deaths: int) -> float:
        """Seconds to wait after so many deaths in a row."""
        return float(min(self.longest, self.first * 2 ** (deaths - 1)))


def _context() -> Any:
    """Clean processes: forked off one that has done nothing but import, or spawned."""
    if "forkserver" not in get_all_start_methods():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(["mmfast.serve.engine.processes.preload"])
    return context


Hear = Callable[[WorkerPlace, str, str, SharedMessage], None]
Lost = Callable[[WorkerPlace, set[str]], None]


class WorkerCrew:
    """Starts workers, hears them, and starts those again that die.

    `hear` and `lost` are called from one thread, in order: whatever a worker sent before it died
    is heard before it is lost.

    Args:
        roles: Maker and number of workers of each role.
        hear: Gets what workers say.
        lost: Gets a place whose worker died, and the jobs it had.
        restarts: How often they are started again.
    """

    def __init__(
        self,
        roles: Mapping[str, tuple[Maker, int]],
        hear: Hear,
        lost: Lost,
        restarts: Restarts | None = None,
    ) -> None:
        self._hear, self._lost, self.restarts = hear, lost, restarts or Restarts()
        self._prefix = f"mmfast-{os.getpid()}-{secrets.token_hex(3)}"
        self._counter = itertools.count()
        self._context = _context()
        self.places = [
            WorkerPlace(role, i, maker) for role, (maker, n) in roles.items() for i in range(n)
        ]
        self.changed = threading.Condition()
        self._closed = False
        self._woken, self._wake = self._context.Pipe(duplex=False)
        for place in self.places:
            self._start(place)
        self._thread = threading.Thread(target=self._run, name="mmfast-crew", daemon=True)
        self._thread.start()

    def of(self, role: str) -> list[WorkerPlace]:
        """Places of a role."""
        return [place for place in self.places if place.role == role]

    def wait(self, seconds: float) -> bool:
        """Wait until everybody is ready or did not start; False when the time is over."""

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
            place.say("stop")
        until = time.monotonic() + seconds
        for place in self.places:
            if place.process is not None:
                place.process.join(max(0.0, until - time.monotonic()))
                place.process.kill()
                place.process.join()
            self._clean(place)
        self._woken.close()
        self._wake.close()

    def _start(self, place: WorkerPlace) -> None:
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
        its.close()  # the worker's end lives in the worker only, so its death ends the pipe

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

    def _restart(self, place: WorkerPlace) -> None:
        """Start a worker; where that fails, as on a machine without room, it counts as a death."""
        try:
            self._start(place)
        except Exception as error:
            LOG.error("a worker cannot be started", exc_info=error)
            with self.changed:
                self._count(place, f"{type(error).__name__}: {error}")
                self._clean(place)

    def _read(self, place: WorkerPlace) -> None:
        wire = place.wire
        assert wire is not None
        try:
            kind, job, packet = wire.hear()
        except Exception as error:
            if not isinstance(error, EOFError | OSError):  # what comes next cannot be told apart
                LOG.error("a worker cannot be understood and is ended", exc_info=error)
            self._miss(place)
            return
        wire.taken += 1  # from here on the packet is ours: to open, to send on, or to free
        if packet.name:
            place.names.count = max(place.names.count, int(packet.name.rpartition("-")[2]))
        try:
            if kind in ("ready", "broken"):
                self._settle(place, kind == "ready", unpack(packet))
            else:
                self._hear(place, kind, job, packet)
        except Exception:  # of one message: all others still wait for this thread
            LOG.exception("what a worker said is lost")
            free(packet.name)

    def _settle(self, place: WorkerPlace, ready: bool, told: Any) -> None:
        """A worker is ready, or says why it never will be."""
        with self.changed:
            place.ready = ready
            place.info, place.reason = (told, "") if ready else ({}, told)
            place.since = time.monotonic()
            self.changed.notify_all()

    def _miss(self, place: WorkerPlace) -> None:
        """A worker is gone: clean up behind it, say so, and plan the next one."""
        process = place.process
        assert process is not None
        process.join(1.0)
        process.kill()  # it closed its pipe; whatever it still does is lost
        process.join()
        with self.changed:
            self._count(place, f"exit code {process.exitcode}")
            jobs, place.jobs = place.jobs, set()
            self._clean(place)
        try:
            self._lost(place, jobs)
        except Exception:
            LOG.exception("the answers of a worker that is lost cannot be ended")

    def _count(self, place: WorkerPlace, reason: str) -> None:
        """One more death; with the lock."""
        now = time.monotonic()
        place.total += 1
        steady = place.ready and now - place.since > self.restarts.steady
        place.deaths = 1 if steady else place.deaths + 1
        place.reason = place.reason or reason
        place.given_up = place.deaths > self.restarts.most
        place.since = now + self.restarts.pause(place.deaths)
        place.ready = False
        self.changed.notify_all()

    def _clean(self, place: WorkerPlace) -> None:
        if place.wire is not None:
            place.wire.pipe.close()
            place.wire.free()
            place.wire = None
        last = place.names.count
        for number in range(last + 1, last + 1 + AHEAD):
            free(f"{place.names.prefix}-{number}")
