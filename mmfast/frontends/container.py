"""Media containers opened with PyAV, and the header of a video checked against the limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.source import VIDEO_KINDS, Limits, MediaSource, refusing

_PROGRESSIVE = (0, 1)  # AV_FIELD_UNKNOWN, AV_FIELD_PROGRESSIVE


@dataclass(frozen=True)
class Header:
    """Facts of a container about its video stream before any frame is decoded."""

    codec: str
    pix_fmt: str
    time_base: Fraction
    rate: Fraction  # average, 0 where the header has none
    origin: int  # in ticks; time 0 of the presentation
    progressive: bool
    alone: bool  # no second video stream, which could confuse decord
    extradata: bytes
    reorders: bool = True  # frames may be decoded in another order than they are shown

    def seconds(self, ticks: Any) -> Any:
        """Convert ticks of the stream to seconds of presentation time."""
        since = np.asarray(ticks, dtype=np.float64) - self.origin
        return since * self.time_base.numerator / self.time_base.denominator


def demuxed(file: Any, form: str, options: dict[str, str]) -> Any:
    """Open a file with one demuxer of PyAV; tags may be no UTF-8, as they always may since 19."""
    known = int(av.__version__.split(".")[0]) < 19
    lenient: dict[str, Any] = {"metadata_errors": "ignore"} if known else {}
    return av.open(file, format=form, options=options, **lenient)


@contextmanager
def open_container(source: MediaSource, form: str, **options: str) -> Iterator[Any]:
    """Open a file with PyAV and one demuxer, which reaches neither the network nor other files."""
    file: Any = source.open() if isinstance(source.data, bytes) else str(source.data)
    options = {"protocol_whitelist": "file", **options}
    with refusing(source.name, "opened"):
        container = demuxed(file, form, options)
    with container:
        yield container


def main_stream(source: MediaSource, container: Any, kind: str, want: str) -> Any:
    """Return the main `video` or `audio` stream; where none decodes, the error asks for `want`."""
    attached = av.stream.Disposition.attached_pic  # the cover picture of a song
    streams = [
        s for s in getattr(container.streams, kind)
        if s.codec_context is not None and not (kind == "video" and s.disposition & attached)
    ]  # fmt: skip
    if not streams:
        kinds = sorted({s.type for s in container.streams if s.type})
        lack = "video stream" if kind == "video" else "sound"
        raise MediaError(
            f"{source.name} has no {lack} that can be decoded, only "
            f"{', '.join(kinds) or 'nothing'}: give {want}"
        )
    best = container.streams.best(kind)
    return best if best in streams else streams[0]


@contextmanager
def open_video(
    source: MediaSource, limits: Limits, threads: str = "AUTO"
) -> Iterator[tuple[Any, Any]]:
    """Open a video; give PyAV's container and its main video stream."""
    bound = {"max_pixels": str(limits.pixels)}
    with open_container(source, VIDEO_KINDS[source.kind], **bound) as container:
        stream = main_stream(source, container, "video", "a file with a picture")
        stream.thread_type = threads
        stream.codec_context.options = bound
        yield container, stream


def read_header(source: MediaSource, container: Any, stream: Any, limits: Limits) -> Header:
    """Check size, length and codec against the limits before anything is decoded."""
    context = stream.codec_context
    if context is None or not stream.time_base:
        raise MediaError(f"{source.name} has a video codec that FFmpeg cannot read: re-encode it")
    limits.check_picture(source.name, stream.width, stream.height)
    limits.check_frames(source.name, stream.frames)
    length = stream.duration * stream.time_base if stream.duration else 0
    limits.check_duration(source.name, max(float(length), (container.duration or 0) / av.time_base))
    # Broadcast clocks start anywhere; in other containers time 0 is the start.
    restarts = source.kind in ("mpegts", "mpeg") and container.start_time is not None
    origin = Fraction(container.start_time, av.time_base) / stream.time_base if restarts else 0
    return Header(
        codec=context.name,
        pix_fmt=context.pix_fmt or "",
        time_base=stream.time_base,
        rate=stream.average_rate or Fraction(0),
        origin=round(origin),
        progressive=int(getattr(context, "field_order", 0) or 0) in _PROGRESSIVE,
        alone=len(container.streams.video) == 1,
        extradata=bytes(context.extradata or b""),
        reorders=bool(context.has_b_frames),
    )
