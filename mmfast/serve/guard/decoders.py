"""A pool of decoding processes with limits of number, memory and time."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError, MmfastError
from mmfast.serve.guard.errors import ApiError, busy
from mmfast.serve.guard.sandbox import anonymous, fill, get, put

_START = 30.0  # seconds for the parent of decoders to import its modules
_CHILD = "mmfast.serve.guard.sandbox"


class ForkServer:
    """The parent of decoding processes; started on first use and after its death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> None:
        """Start the server, unless it runs."""
        with self._lock:
            self._ready()

    def fork(self, theirs: socket.socket, media: int) -> None:
        """Fork a process for a connection and an input."""
        with self._lock:
            for _ in range(2):  # a second try if it has died since the last input
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
        """End the server; running decoders end by their own time limit."""
        with self._lock:
            self._end()


class ProcessHandle:
    """A process that can be killed safely, also after its process id was reused."""

    def __init__(self) -> None:
        self._pid, self._fd, self._lock = 0, -1, threading.Lock()

    def open(self, pid: int) -> None:
        """Take a running process."""
        with self._lock, suppress(OSError):
            self._pid = pid
            if hasattr(os, "pidfd_open"):
                self._fd = os.pidfd_open(pid)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        with self._lock, suppress(OSError):
            if self._fd >= 0:
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)
            elif self._pid and not hasattr(os, "pidfd_open"):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the process."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._pid = -1, 0


_ADD_SEALS, _KEEP_SIZE = 1033, 0x2 | 0x4  # fcntl: neither shrink nor grow
_FORK = 10.0  # seconds for a fork to begin
_TYPES: dict[str, np.dtype[Any]] = {"|u1": np.dtype(np.uint8), "<f4": np.dtype(np.float32)}
Array = np.ndarray[Any, Any]


class Decoders:
    """Forks one process for every input: at most `workers` at once, and `waiting` that wait.

    `held` is the most bytes of decoded media in use.
    """

    def __init__(self, workers: int, waiting: int = 64, held: int = 2 << 30) -> None:
        self._threads = ThreadPoolExecutor(workers, "decoders")
        self._most, self._pending = workers + waiting, 0
        self._held, self._room = _Held(held), threading.Lock()
        self._parent = ForkServer()

    def warm(self) -> None:
        """Start the fork server. If it does not start, the input that needs it is refused."""
        with suppress(ApiError):
            self._parent.start()

    async def decode(self, data: bytes, job: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """Decode one input; cancellation kills its process.

        `MediaError`: it cannot be decoded within its limits; `ApiError` 429: too many inputs wait.
        """
        with self._room:
            if self._pending >= self._most:
                raise busy(f"{self._most} media are being decoded or wait already", code="decoding")
            self._pending += 1
        task = _Task(self._parent, self._held, data, job)
        try:
            future = self._threads.submit(task.run)
        except RuntimeError:  # closed
            self._leave()
            raise ApiError(503, "the server is shutting down", code="closing") from None
        future.add_done_callback(lambda _: self._leave())
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task.stop()
            raise

    def _leave(self) -> None:
        with self._room:
            self._pending -= 1

    def close(self) -> None:
        """End all processes."""
        self._parent.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Held:
    def __init__(self, most: int) -> None:
        self._most, self._now, self._lock = most, 0, threading.Lock()
        self._dropped: deque[int] = deque()  # a finalizer may append at any time

    def keep(self, owner: Any, size: int) -> None:
        """Count `size` bytes until `owner` is freed."""
        with self._lock:
            while self._dropped:
                self._now -= self._dropped.popleft()
            if self._now + size > self._most:
                raise busy("the server holds as many decoded media as it may", 2.0, "media_memory")
            self._now += size
        weakref.finalize(owner, self._dropped.append, size).atexit = False


class _Task:
    """The decoding of one input, in a thread that waits for its process."""

    def __init__(self, parent: ForkServer, held: _Held, data: bytes, job: dict[str, Any]) -> None:
        self._parent, self._held, self._data, self._job = parent, held, data, job
        self._stopped, self._pid = False, ProcessHandle()

    def stop(self) -> None:
        """Kill the process, for the caller has gone."""
        self._stopped = True
        self._pid.kill()

    def run(self) -> tuple[Array, dict[str, Any]]:
        """Decode the input."""
        what, seconds = self._job["kind"], self._job["seconds"]
        if self._stopped:
            raise MediaError(f"decoding of the {what} was cancelled")
        ours, theirs = socket.socketpair()
        media = anonymous()
        try:
            fill(media, self._data)
            with ours:
                with theirs:
                    self._parent.fork(theirs, media)
                return self._talk(ours, time.monotonic() + seconds + 1.0)
        except MmfastError:
            raise
        except TimeoutError:
            raise MediaError(f"decoding the {what} took over {seconds:g} s: cut it") from None
        except (ConnectionError, OSError, ValueError):
            raise MediaError(
                f"the {what} cannot be decoded within the memory and {seconds:g} s allowed: "
                f"it is damaged, or cut it or scale it down"
            ) from None
        finally:
            self._pid.kill()
            self._pid.close()
            os.close(media)

    def _talk(self, sock: socket.socket, deadline: float) -> tuple[Array, dict[str, Any]]:
        sock.settimeout(_FORK)
        try:
            hello, _ = get(sock)
        except OSError:
            self._parent.close()  # it does not fork: the next input starts another one
            raise
        self._pid.open(int(hello["pid"]))
        if self._stopped:
            raise ConnectionError("cancelled")
        put(sock, self._job)
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        reply, fds = get(sock, 1)
        try:
            if "error" in reply:
                raise MediaError(str(reply["error"]))
            return self._mapped(fds[0], reply), reply
        finally:
            for fd in fds:
                os.close(fd)

    def _mapped(self, fd: int, reply: dict[str, Any]) -> Array:
        """Map the result of the process, copy-on-write."""
        _keep_size(fd)
        dtype: np.dtype[Any] = _TYPES[reply["dtype"]]
        shape = tuple(int(n) for n in reply["shape"])
        count = int(np.prod(shape, dtype=np.int64))
        size = count * dtype.itemsize
        if not 0 < size == os.fstat(fd).st_size or size > self._job["limits"]["decoded_bytes"]:
            raise ValueError(f"a result of {size} bytes")
        memory = mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
        self._held.keep(memory, size)
        flat: Array = np.frombuffer(memory, dtype, count)
        return flat.reshape(shape)


def _keep_size(fd: int) -> None:
    """Seal the size of the file, since a cut would crash the reader of the mapping."""
    if sys.platform.startswith("linux"):
        import fcntl

        fcntl.fcntl(fd, _ADD_SEALS, _KEEP_SIZE)
