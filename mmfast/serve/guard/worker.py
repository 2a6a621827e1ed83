"""Decode in processes of their own: bounded in number, memory and time, killed when they hang."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError, MmfastError
from mmfast.serve.guard.errors import ApiError, busy
from mmfast.serve.guard.forking import Parent, Pid
from mmfast.serve.guard.wire import anonymous, fill, get, put

_ADD_SEALS, _KEEP_SIZE = 1033, 0x2 | 0x4  # fcntl: neither shrink nor grow
_FORK = 10.0  # seconds for a process to begin
_TYPES: dict[str, np.dtype[Any]] = {"|u1": np.dtype(np.uint8), "<f4": np.dtype(np.float32)}
Array = np.ndarray[Any, Any]


class Decoders:
    """Forks one process for every input.

    Args:
        workers: Inputs that are decoded at once.
        waiting: Inputs that may wait for that; one more is refused.
        held: Bytes of decoded media that may be in use; what is no longer needed does not count.
    """

    def __init__(self, workers: int, waiting: int = 64, held: int = 2 << 30) -> None:
        self._threads = ThreadPoolExecutor(workers, "decoders")
        self._most, self._pending = workers + waiting, 0
        self._held, self._room = _Held(held), threading.Lock()
        self._parent = Parent()

    def warm(self) -> None:
        """Start the process that the others are forked from."""
        self._parent.start()

    async def decode(self, data: bytes, job: dict[str, Any]) -> tuple[Array, dict[str, Any]]:
        """Decode one input; leaving early kills its process.

        Args:
            data: Encoded.
            job: See `mmfast.serve.guard.decode`, with `seconds` and `memory`.

        Raises:
            MediaError: It cannot be decoded, or not within its limits.
            ApiError: 429, too many wait.
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
    """Counts the bytes of decoded media that somebody still uses."""

    def __init__(self, most: int) -> None:
        self._most, self._now, self._lock = most, 0, threading.Lock()
        self._dropped: deque[int] = deque()  # what a finalizer may do at any time: append

    def keep(self, owner: Any, size: int) -> None:
        """Count `size` bytes until `owner` is gone."""
        with self._lock:
            while self._dropped:
                self._now -= self._dropped.popleft()
            if self._now + size > self._most:
                raise busy("the server holds as many decoded media as it may", 2.0, "media_memory")
            self._now += size
        weakref.finalize(owner, self._dropped.append, size).atexit = False


class _Task:
    """One input, from the thread that waits for it."""

    def __init__(self, parent: Parent, held: _Held, data: bytes, job: dict[str, Any]) -> None:
        self._parent, self._held, self._data, self._job = parent, held, data, job
        self._stopped, self._pid = False, Pid()

    def stop(self) -> None:
        """Nobody waits any more."""
        self._stopped = True
        self._pid.kill()

    def run(self) -> tuple[Array, dict[str, Any]]:
        """Decode it."""
        what, seconds = self._job["kind"], self._job["seconds"]
        if self._stopped:
            raise MediaError(f"nobody waits for the {what}")
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
            said, _ = get(sock)
        except OSError:
            self._parent.close()  # it does not fork: the next input gets another one
            raise
        self._pid.open(int(said["pid"]))
        if self._stopped:
            raise ConnectionError("nobody waits")
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
        """The result where the process left it; a change of ours is ours alone."""
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
    """Nobody can cut the file while it is mapped here."""
    if sys.platform.startswith("linux"):
        import fcntl

        fcntl.fcntl(fd, _ADD_SEALS, _KEEP_SIZE)
