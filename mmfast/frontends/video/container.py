"""Open a video with PyAV and check its header against the limits."""

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
    """What the container says about its video stream before any frame is decoded."""

    codec: str
    pix_fmt: str
    time_base: Fraction
    rate: Fraction  # average, 0 where the header has none
    origin: int  # in ticks; time 0 of the presentation
    progressive: bool
    alone: bool  # no second video stream to confuse another reader
    extradata: bytes

    def seconds(self, ticks: Any) -> Any:
        """Convert ticks of the stream to seconds of presentation time."""
        since = np.asarray(ticks, dtype=np.float64) - self.origin
        return since * self.time_base.numerator / self.time_base.denominator


@contextmanager
def open_video(
    source: MediaSource, limits: Limits, threads: str = "AUTO"
) -> Iterator[tuple[Any, Any]]:
    """Open a video; give PyAV's container and its main video stream.

    The demuxer is fixed by the sniffed kind and nothing but the file itself can be opened, so a
    playlist dressed as a video reaches neither the network nor other files.
    """
    options = {"protocol_whitelist": "file", "max_pixels": str(limits.pixels)}
    file: Any = source.open() if isinstance(source.data, bytes) else str(source.data)
    with refusing(source.name, "opened"):
        container = av.open(
            file, format=VIDEO_KINDS[source.kind], options=options, metadata_errors="ignore"
        )
    with container:
        stream = _main_stream(source, container)
        stream.thread_type = threads
        stream.codec_context.options = {"max_pixels": str(limits.pixels)}
        yield container, stream


def _main_stream(source: MediaSource, container: Any) -> Any:
    attached = av.stream.Disposition.attached_pic  # the cover picture of a song
    videos = [
        s for s in container.streams.video if s.codec_context and not s.disposition & attached
    ]
    if not videos:
        kinds = sorted({s.type for s in container.streams if s.type})
        raise MediaError(
            f"{source.name} has no video stream that can be decoded, only "
            f"{', '.join(kinds) or 'nothing'}: give a file with a picture"
        )
    best = container.streams.best("video")
    return best if best in videos else videos[0]


def read_header(source: MediaSource, container: Any, stream: Any, limits: Limits) -> Header:
    """Check size, length and codec against the limits before anything is decoded."""
    context = stream.codec_context
    if context is None or not stream.time_base:
        raise MediaError(f"{source.name} has a video codec that FFmpeg cannot read: re-encode it")
    limits.check_picture(source.name, stream.width, stream.height)
    limits.check_frames(source.name, stream.frames)
    length = stream.duration * stream.time_base if stream.duration else 0
    limits.check_duration(source.name, max(float(length), (container.duration or 0) / av.time_base))
    # Broadcast clocks start anywhere; every other container's time 0 is its own.
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
    )
