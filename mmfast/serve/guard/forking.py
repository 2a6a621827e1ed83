"""The process that decoding processes are forked from, and one of those by its number."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from mmfast.serve.guard.errors import ApiError

_START = 30.0  # seconds for the first process to import what it needs
_CHILD = "mmfast.serve.guard.child"


class Parent:
    """The process that is forked; started when it is first needed and when it has died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start it, unless it runs."""
        with self._lock:
            self._ready()

    def fork(self, theirs: socket.socket, media: int) -> None:
        """Have it fork a process for this connection and this input.

        Raises:
            ApiError: It does not start.
        """
        with self._lock:
            for _ in range(2):  # it may have died since the last input
                control = self._ready()
                with suppress(OSError):
                    socket.send_fds(control, [b"j"], [theirs.fileno(), media])
                    return
                self._end()
        raise ApiError(503, "the process that decodes media does not start", code="decoder")

    def _ready(self) -> socket.socket:
        if self._control is not None and self._process and self._process.poll() is None:
            return self._control
        self._end()
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=env,
            )
        self._control = ours
        ours.settimeout(_START)
        with suppress(OSError):
            if ours.recv(1) == b"r":
                ours.settimeout(5.0)
                return ours
        self._end()
        raise ApiError(503, "the process that decodes media does not start", code="decoder")

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None

    def close(self) -> None:
        """End it; what it forked ends by its own clock."""
        with self._lock:
            self._end()


class Pid:
    """A process that may be killed at any time, and never another one of its number."""

    def __init__(self) -> None:
        self._pid, self._fd, self._lock = 0, -1, threading.Lock()

    def open(self, pid: int) -> None:
        """It runs, and is ours."""
        with self._lock, suppress(OSError):
            self._pid = pid
            if hasattr(os, "pidfd_open"):
                self._fd = os.pidfd_open(pid)

    def kill(self) -> None:
        """End it, if it still runs."""
        with self._lock, suppress(OSError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            elif self._pid and not hasattr(os, "pidfd_open"):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Forget it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._pid = -1, 0
