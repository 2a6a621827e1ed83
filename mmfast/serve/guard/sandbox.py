"""Decoding processes: a parent with everything imported, and a fork of it for each input.

A fork takes milliseconds and decodes one input under limits of memory and time. On Linux, a
seccomp filter keeps it from the network, from starting programs and from writing files; elsewhere
only the limits and the checks of the front-ends apply. It ends after its input, whatever happened.

Messages between server and process are JSON with a length in front, never pickles: the output of a
decoder that an input has taken over must not run in the server.

Imports no torch, so that a process starts fast and takes little memory.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import platform
import signal
import socket
import struct
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.audio.packets import Samples, decoded_sound, sniff_sound
from mmfast.frontends.container import open_video
from mmfast.frontends.headers import check_header, cut_note
from mmfast.frontends.image import open_image, read_image
from mmfast.frontends.source import IMAGE_KINDS, Limits, MediaSource, open_source
from mmfast.frontends.video.reader import read_video

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | 1  # EPERM
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_RATES = (1_000, 400_000)  # samples per second
_WRITES = 0o3 | 0o100  # O_WRONLY, O_RDWR, O_CREAT
# Machine -> (its number, numbers of refused calls, `open` calls -> argument of the flags,
# calls whose first argument must be this process, or 0).
_CALLS: dict[str, tuple[int, tuple[int, ...], dict[int, int], tuple[int, ...]]] = {
    "x86_64": (
        0xC000003E,
        (
            *(41, 42, 43, 49, 50, 53, 288),  # socket connect accept bind listen socketpair accept4
            *(59, 322, 57, 58, 62, 101),  # execve execveat fork vfork kill ptrace
            *(200, 129, 297),  # tkill rt_sigqueueinfo rt_tgsigqueueinfo
            *(76, 82, 83, 84, 85, 86, 87, 88, 90, 92, 94),  # truncate rename mkdir … lchown
            *(258, 260, 263, 264, 265, 266, 268, 316, 310, 311),  # the same …at; process_vm
            *(425, 426, 427, 437, 438, 424),  # io_uring, openat2, pidfd_getfd, pidfd_send_signal
        ),
        {2: 1, 257: 2},
        (234, 302),  # tgkill prlimit64
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(198, 199, 200, 201, 202, 203, 242),  # socket socketpair bind listen accept connect
            *(221, 281, 129, 117),  # execve execveat kill ptrace
            *(130, 138, 240),  # tkill rt_sigqueueinfo rt_tgsigqueueinfo
            *(33, 34, 35, 36, 37, 38, 45, 53, 54, 276, 270, 271),  # mknodat mkdirat unlinkat …
            *(425, 426, 427, 437, 438, 424),
        ),
        {56: 2},
        (131, 261),
    ),
}


def confine() -> bool:
    """Install the filter in this process for good; return True if it is active."""
    known = _CALLS.get(platform.machine())
    if not sys.platform.startswith("linux") or known is None:
        return False
    program = _program(*known, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(libc.prctl(_SECCOMP, _FILTER, ctypes.c_char_p(header), 0, 0) == 0)


def _program(
    machine: int, refused: tuple[int, ...], opens: dict[int, int], own: tuple[int, ...], me: int
) -> bytes:
    """Assemble the filter: seccomp_data has nr at 0, arch at 4, arguments from 16 on."""
    code = [
        _step(_LOAD, 4),
        _step(_EQUAL, machine, 1, 0),
        _step(_RETURN, _REFUSE),
        _step(_LOAD, 0),
        _step(_AT_LEAST, 0x40000000, 0, 1),  # the same calls of the x32 ABI
        _step(_RETURN, _REFUSE),
    ]
    for number in refused:
        code += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _REFUSE)]
    for number in own:
        code += [
            _step(_EQUAL, number, 0, 5),
            _step(_LOAD, 16),  # the lower half, for the numbers have 32 bits
            _step(_EQUAL, me, 2, 0),
            _step(_EQUAL, 0, 1, 0),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        ]
    for number, argument in opens.items():
        code += [
            _step(_EQUAL, number, 0, 4),
            _step(_LOAD, 16 + 8 * argument),
            _step(_ANY_BIT, _WRITES, 0, 1),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        ]
    return b"".join([*code, _step(_RETURN, _ALLOW)])


def _step(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("HBBI", code, yes, no, value)


def read_sound(source: MediaSource, limits: Limits) -> tuple[Samples, dict[str, Any]]:
    """Decode a sound to mono float32 `[n]` and `runs`, pairs of rate and number of samples.

    And `cut`, whether its file is shorter than its header says.
    """
    count = 0
    parts: list[Samples] = []
    runs: list[list[int]] = []
    for pcm, rate in decoded_sound(source, limits):
        count += len(pcm)
        if 4 * count > limits.decoded_bytes:
            raise MediaError(f"{source.name} is more than {limits.decoded_bytes:,} bytes decoded")
        if not _RATES[0] <= rate <= _RATES[1]:
            raise MediaError(f"{source.name} has {rate} samples per second: convert it to 16000")
        if not np.isfinite(pcm).all():
            raise MediaError(f"{source.name} has samples that are no numbers: record it again")
        parts.append(pcm)
        if not runs or runs[-1][0] != rate:
            runs.append([rate, 0])
        runs[-1][1] += len(pcm)
    if not count:
        raise MediaError(f"{source.name} holds no sound that can be decoded: record it again")
    return np.concatenate(parts), {"runs": runs, "cut": bool(cut_note(source))}


_LENGTH = struct.Struct("<I")
_LONGEST = 16 << 20  # more than the metadata of a million frames


def put(sock: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send a message with file descriptors."""
    data = json.dumps(message).encode()
    head = _LENGTH.pack(len(data))
    if fds:
        socket.send_fds(sock, [head], list(fds))
    else:
        sock.sendall(head)
    sock.sendall(data)


def get(sock: socket.socket, files: int = 0) -> tuple[dict[str, Any], list[int]]:
    """Receive a message with at most `files` file descriptors."""
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
    """Create a file in memory without a name; on disk where the system has no such files."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mmfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def path_of(fd: int) -> str:
    """Return a path under which this process can open a file without a name."""
    return f"/proc/self/fd/{fd}" if Path("/proc/self/fd").is_dir() else f"/dev/fd/{fd}"


def fill(fd: int, data: Any) -> None:
    """Write a whole buffer to a file."""
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + (1 << 26)])


Array = np.ndarray[Any, Any]
ANIMATED = ("gif", "webp", "png", "avif")
_PILLOW = 40  # time of Pillow for a frame, relative to a video decoder


def decode(job: dict[str, Any], path: str) -> tuple[Array, dict[str, Any]]:
    """Decode one input; return samples or pixels, and further facts.

    `job` holds `kind`, `limits` (fields of `Limits`), for a picture the most `pixels` it is reduced
    to, and for a clip `frames` or `fps`, `frame_pixels` and `clip_pixels`.
    """
    limits = Limits(**job["limits"])
    if job["kind"] == "image":
        with warnings.catch_warnings(record=True, action="always") as told:
            pixels = read_image(path, limits=limits)
        pixels, facts = _reduced(pixels, job.get("pixels"))
        notes = [str(each.message).replace(repr(path), "the image") for each in told]
        return pixels, facts | {"note": "; ".join(notes)}
    if job["kind"] == "sound":
        return read_sound(open_source(path, limits, sniff_sound), limits)
    source = open_source(path, limits)
    tight = _tightened(source, limits, job["frame_pixels"], job["clip_pixels"])
    sampling = {k: job[k] for k in ("frames", "fps") if job.get(k) is not None}
    # PyAV reads every kind; the threads of decord would exceed the limits of this process.
    clip = read_video(path, limits=tight, backend="pyav", **sampling)
    return np.ascontiguousarray(clip.frames), {"metadata": clip.metadata(), "mended": clip.mended}


def _reduced(pixels: Array, most: int | None) -> tuple[Array, dict[str, Any]]:
    """Reduce a picture `[H, W, 3]` of more than `most` pixels by a whole factor."""
    from PIL import Image

    if most is None or pixels.shape[0] * pixels.shape[1] <= most:
        return pixels, {}
    factor = math.ceil(math.sqrt(pixels.shape[0] * pixels.shape[1] / most))
    return np.asarray(Image.fromarray(pixels).reduce(factor)), {"reduced": True}


def _tightened(source: MediaSource, limits: Limits, frame: int, clip: int) -> Limits:
    """Limit the number of frames by the size of one, before any is decoded."""
    if source.kind in IMAGE_KINDS:
        if source.kind not in ANIMATED:
            raise MediaError(f"{source.name} is a still image ({source.kind}): give it as an image")
        with open_image(source, limits) as image:
            width, height = image.size
        most = clip // _PILLOW // (width * height)
    else:
        check_header(source)
        with open_video(source, replace(limits, pixels=frame)) as (_, stream):
            width, height = stream.width, stream.height
        replace(limits, pixels=frame).check_picture(source.name, width, height)
        most = clip // (width * height)
    return replace(limits, pixels=min(limits.pixels, frame), frames=min(limits.frames, most))


def main(control: socket.socket) -> None:
    """Fork a process for every input that arrives with its connection."""
    _warm()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server
    control.sendall(b"r")
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not message:
            return
        pid = os.fork() if len(fds) == 2 else -1
        if pid == 0:
            control.close()
            _one(socket.socket(fileno=fds[0]), fds[1])
        for fd in fds:
            os.close(fd)


def _warm() -> None:
    """Import the modules that decoders import on first use.

    Pictures are also decoded once, but not clips, whose threads a fork would lack.
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
    try:
        put(sock, {"pid": os.getpid()})
        job, _ = get(sock)
        limit(job["memory"], job["seconds"], job["limits"]["decoded_bytes"])
        confine()
        _answer(sock, job, media)
    except BaseException:  # the server is gone
        os._exit(1)
    os._exit(0)


def _answer(sock: socket.socket, job: dict[str, Any], media: int) -> None:
    path = path_of(media)
    try:
        array, facts = decode(job, path)
        result = anonymous()
        fill(result, array)
    except MediaError as error:
        put(sock, {"error": str(error).replace(repr(path), f"the {job['kind']}")})
    except MemoryError:
        put(sock, {"error": f"the {job['kind']} needs more memory to decode than is allowed"})
    except Exception as error:  # decoders raise many exceptions on damaged data
        kind = type(error).__name__
        put(sock, {"error": f"the {job['kind']} cannot be decoded ({kind}): it is damaged"})
    else:
        put(sock, {"shape": array.shape, "dtype": array.dtype.str, **facts}, (result,))


def limit(memory: int, seconds: float, result: int) -> None:
    """Set the resource limits of this process: bytes beyond those in use, seconds, file size.

    `seconds` are by the clock; the limit of processor time on all cores is four times that.
    """
    import resource  # not on Windows, where the server imports this module

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds + 0.5)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(4 * seconds) + 1,
        resource.RLIMIT_FSIZE: result + 4096,
        resource.RLIMIT_DATA: _data() + memory,
    }
    for limit_of, value in limits.items():
        with suppress(ValueError, OSError):  # the limit is lower already
            resource.setrlimit(limit_of, (value, value))
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # messages of FFmpeg
        os.dup2(quiet, stream)


def _data() -> int:
    """Return the bytes of private memory of this process."""
    with suppress(OSError), Path("/proc/self/status").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("VmData:"):
                return int(line.split()[1]) << 10
    return 256 << 20


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
