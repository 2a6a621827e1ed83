"""Worker processes as their parent sees them: started, listened to, missed, started again."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context
from typing import Any

from mmfast.serve.engine.place import Place
from mmfast.serve.engine.shared import Names, Packet, free, unpack
from mmfast.serve.engine.worker import Maker, Wire, work

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
    context.set_forkserver_preload(["mmfast.serve.engine.preload"])
    return context


Hear = Callable[[Place, str, str, Packet], None]
Lost = Callable[[Place, set[str]], None]


class Crew:
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
            Place(role, i, maker) for role, (maker, n) in roles.items() for i in range(n)
        ]
        self.changed = threading.Condition()
        self._closed = False
        self._woken, self._wake = self._context.Pipe(duplex=False)
        for place in self.places:
            self._start(place)
        self._thread = threading.Thread(target=self._run, name="mmfast-crew", daemon=True)
        self._thread.start()

    def of(self, role: str) -> list[Place]:
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

    def _start(self, place: Place) -> None:
        mine, its = self._context.Pipe()
        number = next(self._counter)
        place.names = Names(f"{self._prefix}-{number}w")
        place.wire = Wire(mine, Names(f"{self._prefix}-{number}p"))
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

    def _restart(self, place: Place) -> None:
        """Start a worker; where that fails, as on a machine without room, it counts as a death."""
        try:
            self._start(place)
        except Exception as error:
            LOG.error("a worker cannot be started", exc_info=error)
            with self.changed:
                self._count(place, f"{type(error).__name__}: {error}")
                self._clean(place)

    def _read(self, place: Place) -> None:
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

    def _settle(self, place: Place, ready: bool, told: Any) -> None:
        """A worker is ready, or says why it never will be."""
        with self.changed:
            place.ready = ready
            place.info, place.reason = (told, "") if ready else ({}, told)
            place.since = time.monotonic()
            self.changed.notify_all()

    def _miss(self, place: Place) -> None:
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

    def _count(self, place: Place, reason: str) -> None:
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

    def _clean(self, place: Place) -> None:
        if place.wire is not None:
            place.wire.pipe.close()
            place.wire.free()
            place.wire = None
        last = place.names.count
        for number in range(last + 1, last + 1 + AHEAD):
            free(f"{place.names.prefix}-{number}")
