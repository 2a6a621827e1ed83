"""What runs in a worker process: one role, fed through a pipe."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Protocol

from mmfast.cli_output import quiet
from mmfast.serve.engine.shared import Names, Packet, free, pack, unpack

LOG = logging.getLogger("mmfast.serve")
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

    def __init__(self, pipe: Connection, names: Names) -> None:
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

    def forward(self, kind: str, job: str, packet: Packet) -> None:
        """Send on what came from another process, unopened.

        Raises:
            OSError: The other end is gone; the packet is freed.
        """
        with self._lock:
            self._send(kind, job, packet)

    def _send(self, kind: str, job: str, packet: Packet) -> None:
        self._open.append(packet.name)
        try:
            self.pipe.send_bytes(pickle.dumps((self.taken, kind, job, packet), protocol=5))
        except OSError:
            free(self._open.pop())
            raise

    def hear(self) -> tuple[str, str, Packet]:
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
    wire, box = Wire(pipe, Names(prefix)), _Box()
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
        self._waiting: list[tuple[str, str, Packet]] = []
        self._some = threading.Condition()

    def put(self, message: tuple[str, str, Packet]) -> None:
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


def _take(role: Role, wire: Wire, kind: str, job: str, packet: Packet) -> None:
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
