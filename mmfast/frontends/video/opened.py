"""Videos that PyAV, decord or torchcodec has opened already, as frames with their times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from mmfast.core.errors import MediaError
from mmfast.frontends.image import decoded
from mmfast.frontends.source import refusing

Unread = partial[tuple[Any, float]]  # a frame and its seconds, decoded when it is called for


def container_frames(container: Any) -> Iterator[tuple[Any, float | None]]:
    """Yield the frames of an open PyAV container from its start, where it can go back there."""
    name = "the PyAV container"
    if not container.streams.video:
        raise MediaError(f"{name} has no video stream: give a file with one")
    with suppress(Exception):  # a pipe is read from where it stands
        container.seek(0)
    frames = container.decode(video=0)
    while True:
        with refusing(name):
            frame = next(frames, None)
        if frame is None:
            return
        yield decoded(frame), frame.time


def reader_frames(reader: Any, library: str) -> list[tuple[Unread, float]]:
    """List the frames of a reader of decord or torchcodec, unread, with their times in seconds.

    The times of torchcodec are those of its mean rate until a frame is read.
    """
    count = range(len(reader))
    if library == "decord":
        spans = reader.get_frame_timestamp(count) if count else []
        return [(partial(_of_decord, reader, i), float(spans[i][0])) for i in count]
    rate, start = float(reader.metadata.average_fps), float(reader.metadata.begin_stream_seconds)
    return [(partial(_of_torchcodec, reader, i), start + i / rate) for i in count]


def _of_decord(reader: Any, number: int) -> tuple[Any, float]:
    return decoded(reader[number]), float(reader.get_frame_timestamp(number)[0])


def _of_torchcodec(reader: Any, number: int) -> tuple[Any, float]:
    frame = reader.get_frame_at(number)
    return frame.data, float(frame.pts_seconds)
