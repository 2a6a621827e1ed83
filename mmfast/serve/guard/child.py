"""The processes that decode: one that waits with everything imported, and a fork of it an input.

A fork costs milliseconds, sees one input, has little memory and time, cannot reach the network,
start programs or write files, and is gone afterwards, whatever the input did to it.
"""

from __future__ import annotations

import io
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmfast.core.errors import MediaError
from mmfast.frontends.image import read_image
from mmfast.serve.guard.confine import confine
from mmfast.serve.guard.decode import decode
from mmfast.serve.guard.wire import anonymous, fill, get, path_of, put


def main(control: socket.socket) -> None:
    """Fork a process for every pair of files that comes: its connection and its input."""
    _warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks leave nothing behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's business
    control.sendall(b"r")
    while True:
        said, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not said:
            return
        pid = os.fork() if len(fds) == 2 else -1
        if pid == 0:
            control.close()
            _one(socket.socket(fileno=fds[0]), fds[1])
        for fd in fds:
            os.close(fd)


def _warm() -> None:
    """Import what decoders import when they are first used.

    Pictures are also decoded once; clips not, whose threads no fork would have.
    """
    import av.subtitles.stream  # noqa: F401
    import numpy.ma  # noqa: F401
    import soundfile  # noqa: F401
    from PIL import Image

    Image.init()
    for kind in ("PNG", "JPEG", "WEBP"):
        Image.new("RGB", (8, 8)).save(file := io.BytesIO(), kind)
        read_image(file.getvalue())


def _one(sock: socket.socket, media: int) -> None:
    """Decode one input, answer, and end."""
    try:
        put(sock, {"pid": os.getpid()})
        job, _ = get(sock)
        limit(job["memory"], job["seconds"], job["limits"]["decoded_bytes"])
        confine()
        _answer(sock, job, media)
    except BaseException:  # nobody is there to hear it
        os._exit(1)
    os._exit(0)


def _answer(sock: socket.socket, job: dict[str, Any], media: int) -> None:
    path = path_of(media)
    try:
        array, facts = decode(job, path)
        result = anonymous()
        fill(result, array)
    except MediaError as error:
        told = str(error).replace(repr(path), f"the {job['kind']}")
        put(sock, {"error": told})
    except MemoryError:
        put(sock, {"error": f"the {job['kind']} needs more memory to decode than is allowed"})
    except Exception as error:  # garbage makes decoders raise nearly anything
        kind = type(error).__name__
        put(sock, {"error": f"the {job['kind']} cannot be decoded ({kind}): it is damaged"})
    else:
        put(sock, {"shape": array.shape, "dtype": array.dtype.str, **facts}, (result,))


def limit(memory: int, seconds: float, result: int) -> None:
    """Bound what this process may use from here on.

    Args:
        memory: Bytes beyond what it has.
        seconds: Of the clock; processor time on all cores is bounded by four times that.
        result: Bytes of the largest file.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 0.5)
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_CPU, int(4 * seconds) + 1)
    _set(resource.RLIMIT_FSIZE, result + 4096)
    _set(resource.RLIMIT_DATA, _data() + memory)
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what FFmpeg has to say about a stranger's file
        os.dup2(quiet, stream)


def _set(what: int, value: int) -> None:
    with suppress(ValueError, OSError):  # lower already
        resource.setrlimit(what, (value, value))


def _data() -> int:
    """Bytes of private memory that this process has."""
    with suppress(OSError), Path("/proc/self/status").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    return 256 << 20


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
