"""The place of a worker process in the eyes of its parent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmfast.serve.engine.shared import Names, Packet, free
from mmfast.serve.engine.worker import Maker, Wire


@dataclass(eq=False)
class Place:
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
    names: Names = field(default_factory=lambda: Names(""))  # of what the worker makes
    since: float = 0.0  # ready, or when to start again

    def say(self, kind: str, job: str = "", value: Any = None) -> bool:
        """Send a value to the worker; False where it is gone."""
        return self._sent(lambda wire: wire.say(kind, job, value))

    def forward(self, kind: str, job: str, packet: Packet) -> bool:
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


def near(ready: Sequence[Place], call: str) -> Place:
    """The encoder that had the same media before, unless others have less to do.

    Args:
        ready: Encoders.
        call: Ends in a number that stands for the media.
    """
    home = ready[int(call.rpartition(":")[2]) % len(ready)]
    idle = min(ready, key=lambda each: len(each.jobs))
    return home if len(home.jobs) <= len(idle.jobs) + 1 else idle
