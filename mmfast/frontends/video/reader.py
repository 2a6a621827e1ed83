"""Reader of videos from any kind of media: frames with their true times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Clip, Frame, Frames, Orientation, make_clip
from mmfast.frontends.container import Header, open_video, read_header
from mmfast.frontends.headers import check_header
from mmfast.frontends.image import image_clip, iter_animation, open_image, read_animation
from mmfast.frontends.sampling import Ask, Indices, positive_rate, sample_stream
from mmfast.frontends.source import (
    DEFAULT_LIMITS,
    IMAGE_KINDS,
    Damage,
    Limits,
    MediaSource,
    Mismatch,
    is_encoded,
    open_source,
    quote,
)
from mmfast.frontends.video import decoders
from mmfast.frontends.video.decoders import Index, packet_index
from mmfast.frontends.video.sequences import iter_sequence, sequence_clip
from mmfast.frontends.video.threads import DEFAULT_AHEAD, Ahead, fill, sampled, suits, worth

BACKENDS = ("auto", "decord", "pyav")


@dataclass(frozen=True)
class _FilePlan:
    """Facts about a file after listing its packets and decoding its first frame."""

    source: MediaSource
    ask: Ask
    limits: Limits
    header: Header
    turn: Orientation
    size: tuple[int, int]  # width, height after rotation

    def choose(self, index: Index) -> tuple[Indices, Indices, Frames]:
        times, end = self.header.seconds(index.ticks), float(self.header.seconds(index.end))
        half_tick = float(self.header.time_base) / 2 + 1e-9
        self.limits.check_duration(self.source.name, end - float(times[0]))
        asked = self.ask.choose(self.source.name, times, end, half_tick)
        rows = np.unique(asked)
        self.limits.check_decoded(self.source.name, len(asked), *self.size)
        width, height = self.size
        return asked, rows, np.empty((len(rows), height, width, 3), np.uint8)

    def attempt(
        self, index: Index, backend: str, decode: Callable[[Indices, Frames], bool | None]
    ) -> Clip | None:
        asked, rows, out = self.choose(index)
        try:
            done = decode(rows, out)
        except Mismatch:
            return None
        return None if done is False else self.clip(index, asked, rows, out, backend)

    def clip(self, index: Index, asked: Indices, rows: Indices, out: Frames, backend: str) -> Clip:
        in_order = len(asked) == len(rows) and (asked == rows).all()
        return make_clip(
            frames=out if in_order else out[np.searchsorted(rows, asked)],
            rows=asked,
            times=self.header.seconds(index.ticks),
            end=float(self.header.seconds(index.end)),
            rate=float(self.header.rate),
            source=self.source.name,
            backend=backend,
            mended=index.mended,
        )


def read_file(source: MediaSource, ask: Ask, limits: Limits, backend: str) -> Clip:
    """Read the requested frames of a file; both decoders give the same ones."""
    check_header(source)
    with open_video(source, limits) as (container, stream):
        header = read_header(source, container, stream, limits)
        index = packet_index(source, container, stream, header, limits)
    first: Any = decoders.first_frame(source, limits)
    turn = Orientation.of(first)
    plan = _FilePlan(source, ask, limits, header, turn, turn.size(first.width, first.height))
    obstacle = decoders.decord_obstacle(source, header, index, bool(first.interlaced_frame), turn)
    if backend == "decord" and obstacle:
        raise MediaError(f"decord cannot read {source.name} ({obstacle}): use backend='auto'")
    clip, groups = None, index.groups
    if backend != "decord" and groups is not None:
        clip = plan.attempt(
            index,
            "pyav",
            lambda rows, out: fill(source, limits, groups, index.ticks[rows], turn, out),
        )
    if clip is None and backend != "pyav" and not obstacle:
        clip = plan.attempt(
            index, "decord", lambda *want: decoders.read_decord(source, header, index, *want)
        )
    if clip is None and backend == "decord":
        raise MediaError(f"decord failed on {source.name}: use backend='auto'")
    if clip is None and index.trusted:
        clip = plan.attempt(
            index, "pyav", lambda *want: decoders.read_exact(source, limits, index, turn, *want)
        )
    if clip is None:  # damage and missing times ask for counting from the start
        index, style = decoders.count_frames(source, limits, header, index)
        asked, wanted, frames = plan.choose(index)
        decoders.read_counted(source, limits, wanted, turn, frames, style)
        clip = plan.clip(index, asked, wanted, frames, "pyav")
    return clip


def iter_file(
    source: MediaSource,
    limits: Limits,
    fps: float | None = None,
    ahead: Ahead = DEFAULT_AHEAD,
    events: Counter[str] | None = None,
) -> Iterator[tuple[Frame, float]]:
    """Yield the frames of a file in turn, or those at every 1/fps s; damaged packets are skipped.

    The consumer sets the pace, so no wall clock counts. A bad header is an error now, a spent
    budget later.
    """
    check_header(source)
    with open_video(source, limits) as (container, stream):
        header = read_header(source, container, stream, limits)
        count = stream.frames or float(container.duration or 0) / 1e6 * float(header.rate)
    first = decoders.first_frame(source, limits)
    turn = Orientation.of(first)
    half_tick = float(header.time_base) / 2 + 1e-9
    free = limits.untimed()

    def from_start(threads: str) -> Iterator[tuple[Frame, float]]:
        pairs = decoders.read_all(source, free, header, turn, threads, events)
        return sample_stream(pairs, fps, half_tick)

    if fps is None or not suits(source, header) or not worth(count, first.width * first.height):
        return from_start("AUTO")
    size = turn.size(first.width, first.height)
    fast = sampled(source, free, header, turn, size, fps, half_tick, ahead)
    return _else_from_start(fast, from_start)


def _else_from_start(
    fast: Iterator[tuple[Frame, float]], slow: Callable[[str], Iterator[tuple[Frame, float]]]
) -> Iterator[tuple[Frame, float]]:
    """Yield `fast`, and where it fails, the rest of `slow`, which gives the same frames."""
    given = 0
    try:
        for pair in fast:
            given += 1
            yield pair
    except Mismatch as reason:
        # After damage, frame threads drop other frames each time.
        threads = "SLICE" if isinstance(reason, Damage) else "AUTO"
        yield from islice(slow(threads), given, None)


def read_video(
    media: object,
    *,
    frames: int | None = None,
    fps: float | None = None,
    times: Sequence[float] | None = None,
    limits: Limits = DEFAULT_LIMITS,
    backend: str = "auto",
    rate: float | None = None,
) -> Clip:
    """Read some frames of a video, with the times at which they are really shown.

    Takes a path, bytes, a binary file object; a PIL animation; a numpy array or torch tensor [T, H,
    W, C] or [T, C, H, W] with 1, 3 or 4 channels, uint8 or float in [0, 1]; a list or iterator of
    pictures (anything `read_image` takes), or of (picture, seconds) pairs; an open container of
    PyAV, reader of decord or decoder of torchcodec. Exactly one of these selects frames:

    ``frames=k``, numbers ``round(linspace(0, n - 1, k))``, all n if the clip has no more;
    ``fps=r``, the frame on screen at every 1/r s from the first frame on, each frame once;
    ``times=[...]``, the frame on screen at each time of the file's own timeline, in the order
    given.

    A file's packets are listed without decoding them, then only the groups of pictures that hold a
    wanted frame are decoded. Phone rotation and mirroring are applied, edit lists followed, sound
    ignored, 10-bit colour rounded to 8 bits without tone mapping, non-square pixels kept. After
    damage a frame is as the decoder conceals it. Up to 16 frames in a row whose time repeats that
    of the one before, or lies further back, are spread between their neighbours (`Clip.mended`),
    with a warning. `backend` is ``auto`` (decord for what it reads
    exactly, else PyAV), ``decord`` or ``pyav``; both give the same frames. Decoded frames without
    times come at `rate` per second, 24 if not given.

    Raises:
        MediaError: The media are missing, broken, too large or of the wrong kind, or an argument is
            out of range; one line that names the value and the fix.
    """
    ask = Ask.parse(frames, fps, times)
    if backend not in BACKENDS:
        raise MediaError(f"unknown backend {quote(backend)}: choose {', '.join(BACKENDS)}")
    if is_encoded(media):
        source = open_source(media, limits)
        if source.kind in IMAGE_KINDS:
            return read_animation(source, ask, limits)
        return read_file(source, ask, limits, backend)
    if isinstance(media, Image.Image):
        return image_clip(media, ask, limits, "the animation")
    return sequence_clip(media, ask, limits, rate)


def iter_video(
    media: object,
    *,
    fps: float | None = None,
    limits: Limits = DEFAULT_LIMITS,
    rate: float | None = None,
    ahead: Ahead = DEFAULT_AHEAD,
    events: Counter[str] | None = None,
) -> Iterator[tuple[Frame, float]]:
    """Yield the frames of a video lazily: (picture [H, W, 3] uint8, seconds).

    With `fps` it yields the frames of ``read_video(media, fps=...)``, one frame later than the
    source; without, every frame. A long file of which few frames are wanted is decoded by several
    threads, which run `ahead`; other media are decoded on request and nothing is held. An endless
    iterator of frames stays endless: limits on frames and duration apply to files only, and a slow
    consumer meets no time limit. A bad argument or file is an error at once, damage inside it
    later. `events` counts frames whose time was `mended`, as in `read_video`.
    """
    step = None if fps is None else positive_rate("fps", fps)
    if is_encoded(media):
        source = open_source(media, limits)
        if source.kind not in IMAGE_KINDS:
            return iter_file(source, limits, step, ahead, events)
        media = source
    pairs, tolerance = _stream(media, limits, rate, Counter() if events is None else events)
    return sample_stream(pairs, step, tolerance)


def _stream(
    media: object, limits: Limits, rate: object, events: Counter[str]
) -> tuple[Iterator[Any], float]:
    """Return the frames of any media but video files, and the rounding of their times."""
    if isinstance(media, Image.Image):
        return iter_animation(media, limits, "the animation"), 5e-4
    if not isinstance(media, MediaSource):
        return iter_sequence(media, limits, rate, events), 1e-6
    source = media

    def opened() -> Iterator[tuple[Frame, float]]:
        with open_image(source, limits) as image:
            yield from iter_animation(image, limits, source.name)

    return opened(), 5e-4
