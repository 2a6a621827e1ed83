"""Messages between the server and the processes that decode: JSON with its length before it.

Never pickles: what a decoder says must not run in the server.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<I")
_LONGEST = 16 << 20  # metadata of a clip of a million frames would be less


def put(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a message, and files with it."""
    data = json.dumps(message).encode()
    head = _LENGTH.pack(len(data))
    if fds:
        socket.send_fds(sock, [head], list(fds))
    else:
        sock.sendall(head)
    sock.sendall(data)


def get(sock: socket.socket, files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive a message, and at most `files` files with it.

    Raises:
        ConnectionError: The other side is gone.
    """
    fds: list[int] = []
    if files:
        head, fds, _, _ = socket.recv_fds(sock, _LENGTH.size, files)
        head += _exactly(sock, _LENGTH.size - len(head)) if head else b""
    else:
        head = _exactly(sock, _LENGTH.size)
    if not head:
        raise ConnectionError("the other side is gone")
    (length,) = _LENGTH.unpack(head)
    if length > _LONGEST:
        raise ConnectionError(f"a message of {length} bytes")
    found = json.loads(_exactly(sock, length))
    return (found if isinstance(found, dict) else {}), fds


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(count - len(parts), 1 << 20))
        if not part:
            raise ConnectionError("the other side is gone")
        parts += part
    return bytes(parts)


def anonymous() -> int:
    """A file in memory that has no name; on disk where the system has no such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def path_of(fd: int) -> str:
    """A name under which this process can open a file that has none."""
    return f"/proc/self/fd/{fd}" if Path("/proc/self/fd").is_dir() else f"/dev/fd/{fd}"


def fill(fd: int, data: Any) -> None:
    """Write all of a buffer."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + (1 << 26)])
