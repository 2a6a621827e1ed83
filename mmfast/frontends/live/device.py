"""Cameras and other sources that FFmpeg reads as they run, timed from their first frame."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any

import av
import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.picture import Frame, Orientation
from mmfast.frontends.source import Limits, first_line, quote

_RATE = 25  # frames per second, where nothing is known


def camera_address(camera: int | str, platform: str = sys.platform) -> tuple[str, str]:
    """FFmpeg's input format and device name of a camera.

    Args:
        camera: Its number, or its name: a path such as ``/dev/video0`` on Linux, what the system
            calls it elsewhere.
        platform: As `sys.platform`.

    Raises:
        MediaError: The number is negative, or this system has no numbers or no cameras.
    """
    text = str(camera)
    number = text.isdecimal()
    if not text or (isinstance(camera, int) and camera < 0):
        raise MediaError(f"camera {camera!r} does not exist: give 0 for the first one, or a name")
    if platform.startswith("linux"):
        device = f"/dev/video{text}" if number else text
        if not device.startswith("/dev/"):
            raise MediaError(f"camera {quote(text)}: give its number or a path such as /dev/video0")
        return "v4l2", device
    if platform == "darwin":
        return "avfoundation", f"{text}:none"
    if platform == "win32":
        if number:
            raise MediaError(
                f"camera {text}: Windows names its cameras; give 'camera:NAME' with the name that "
                f"`ffmpeg -list_devices true -f dshow -i dummy` prints"
            )
        return "dshow", f"video={text}"
    raise MediaError(f"no cameras are known on {platform}: give an iterator of frames")


def open_camera(camera: int | str, timeout: float) -> Any:
    """Open a camera.

    Returns:
        PyAV's container.

    Raises:
        MediaError: It is not there, busy, or FFmpeg was built without it.
    """
    form, device = camera_address(camera)
    try:
        return av.open(device, format=form, timeout=timeout)
    except Exception as error:  # FFmpegError, ValueError for an unknown format
        raise MediaError(
            f"camera {camera} ({device}, {form}) cannot be opened ({first_line(error)}): check "
            f"that it is plugged in, free, and that you may read it"
        ) from None


def running_frames(
    container: Any, name: str, limits: Limits, file: Any = None
) -> Iterator[tuple[Any, float | None]]:
    """Yield PyAV frames of an open source with the seconds since the first one.

    A packet that does not decode is yielded as its exception, for the consumer to count. The
    container is closed at the end, and what it reads from.

    Raises:
        MediaError: There is no video in it, or reading fails.
    """
    with closing(file) if file is not None else nullcontext(), container:
        stream: Any = container.streams.best("video")
        if stream is None or stream.codec_context is None:
            raise MediaError(f"{name} has no video that can be decoded: give one with a picture")
        stream.codec_context.options = {"max_pixels": str(limits.pixels)}
        limits.check_picture(
            name, stream.width or limits.min_side, stream.height or limits.min_side
        )
        since = _Since(stream)
        try:
            for packet in container.demux(stream):
                for frame in _decoded(packet):
                    broken = isinstance(frame, BaseException)
                    yield frame, None if broken else since(frame.pts)
        except av.FFmpegError as error:
            raise MediaError(
                f"{name} broke off ({first_line(error)}): check the source and open it again"
            ) from None


class _Since:
    """Seconds since the first frame.

    Some sources, RTSP among them, give their first frames no time: these lie a frame apart and
    the first known time follows on them.
    """

    def __init__(self, stream: Any) -> None:
        self._tick = float(stream.time_base)
        self._step = 1 / float(stream.guessed_rate or stream.average_rate or _RATE)
        self._untimed = 0
        self._origin: float | None = None

    def __call__(self, pts: int | None) -> float | None:
        """Time of a frame; None where it has none and others have."""
        if pts is None:
            self._untimed += 1
            return (self._untimed - 1) * self._step if self._origin is None else None
        if self._origin is None:
            self._origin = pts * self._tick - self._untimed * self._step
        return pts * self._tick - self._origin


def _decoded(packet: Any) -> list[Any]:
    try:
        return list(packet.decode())
    except av.FFmpegError as error:
        return [error]


def running_rgb(frame: Any, name: str, limits: Limits) -> Frame:
    """Convert one item of `running_frames` to upright RGB [H, W, 3].

    Raises:
        MediaError: It is an exception, or of a size that the limits refuse.
    """
    if isinstance(frame, BaseException):
        raise MediaError(f"a packet of {name} cannot be decoded ({first_line(frame)})")
    limits.check_picture(name, frame.width, frame.height)
    return np.ascontiguousarray(Orientation.of(frame).apply(frame.to_ndarray(format="rgb24")))
