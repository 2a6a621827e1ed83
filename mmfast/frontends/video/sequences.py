"""Clips from frames: arrays, tensors, lists, iterators, and videos that others have opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Clip, Frame, make_clip
from mmfast.frontends.image import (
    array_picture,
    channel_axis,
    decoded,
    is_array,
    is_av_frame,
    is_sequence,
    is_tensor,
    library_of,
    picture,
)
from mmfast.frontends.sampling import Ask, Floats, positive_rate, rising
from mmfast.frontends.source import Limits, quote, refusing
from mmfast.frontends.video.opened import container_frames, reader_frames

DEFAULT_RATE = 24.0  # the assumption of transformers' processors


@dataclass(frozen=True)
class _FrameOptions:
    name: str  # for messages
    items: Iterable[Any]  # frames, or (frame, seconds) pairs
    counted: bool = True  # False for an iterator, whose length is unknown
    axis: int | None = None  # of the channels, where it is the same for all frames
    unread: bool = False  # pairs of `Unread`, decoded where they are wanted


def sequence_clip(media: object, ask: Ask, limits: Limits, rate: object) -> Clip:
    """Read the requested frames of an array, tensor, list or iterator."""
    speed = DEFAULT_RATE if rate is None else positive_rate("rate", rate)
    given = _given(media)
    if not given.counted:
        given = _FrameOptions(given.name, list(_hold(given, limits)), axis=-1)
    stamps = [split_pair(item)[1] for item in given.items]
    if not stamps:
        raise MediaError(f"{given.name} is empty: give at least one frame")
    limits.check_frames(given.name, len(stamps))
    if ask.frames is None and stamps[0] is None and rate is None:
        raise MediaError(
            f"{given.name} has no times: give rate=, its frames per second, or use frames="
        )
    times, end, mended = _times(stamps, speed, given.name)
    asked = ask.choose(given.name, times, end, 1e-6)
    wanted = set(asked.tolist())
    found: dict[int, Frame] = {}
    for i, frame, time in _convert(given, limits, wanted):
        if i in wanted:
            times[i] = time if given.unread else times[i]
            limits.check_decoded(given.name, len(asked), frame.shape[1], frame.shape[0])
            found[i] = frame
    picked = np.stack([found[i] for i in asked.tolist()])  # [m, H, W, 3]
    return make_clip(picked, asked, times, end, speed, given.name, "array", mended)


def iter_sequence(
    media: object, limits: Limits, rate: object, events: Counter[str]
) -> Iterator[tuple[Frame, float]]:
    """Yield each frame with its time at once, without a limit on their number."""
    speed = DEFAULT_RATE if rate is None else positive_rate("rate", rate)
    given = _given(media)
    numbered = (((i, frame), time) for i, frame, time in _convert(given, limits))
    for (i, frame), time in rising(numbered, given.name, events):
        yield frame, i / speed if time is None else time


def _given(media: object) -> _FrameOptions:
    media = decoded(media)
    if is_array(media):
        return _array(media)
    if isinstance(media, list | tuple):
        return _FrameOptions("the list of frames", media)
    if is_sequence(media):
        return _FrameOptions("the frame iterator", media, counted=False)  # type: ignore[arg-type]
    if library := library_of(media):
        name = f"the video that {library} has opened"
        if library == "av":
            return _FrameOptions(name, container_frames(media), counted=False)
        return _FrameOptions(name, reader_frames(media, library), unread=True)
    raise MediaError(
        f"a video cannot be of type {type(media).__name__}, {quote(media)}: give a path, bytes, "
        f"a file object, a PIL animation, an array, or a list or iterator of frames"
    )


def _array(media: Any) -> _FrameOptions:
    name, shape = "the video array", tuple(media.shape)
    if len(shape) != 4:
        raise MediaError(
            f"{name} has shape {list(shape)}: give [T, H, W, 3] or [T, 3, H, W] "
            f"(a single picture needs a frame axis in front)"
        )
    if 0 in shape:
        raise MediaError(f"{name} has shape {list(shape)}, which holds no frame: give at least one")
    axis = channel_axis(shape, is_tensor(media), name)
    return _FrameOptions(name, [media[i] for i in range(shape[0])], axis=axis)  # views


def split_pair(item: Any) -> tuple[Any, float | None]:
    """Return picture and seconds of a (picture, seconds or None) pair, or of a picture alone.

    A frame of PyAV knows its time.
    """
    if is_av_frame(item):
        return item, item.time
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Real | None):
        return item[0], None if item[1] is None else float(item[1])
    return item, None


def _convert(
    given: _FrameOptions, limits: Limits, wanted: Collection[int] | None = None
) -> Iterator[tuple[int, Frame, float | None]]:
    """Yield number, picture and time of the frames; of unread ones, those that are wanted."""
    first: tuple[int, ...] = ()
    for i, item in enumerate(given.items):
        raw, time = split_pair(item)
        name = f"frame {i} of {given.name}"
        if given.unread:
            if wanted is not None and i not in wanted:
                continue
            with refusing(name):
                raw, time = raw()
        if given.axis is None:
            frame = picture(raw, name, limits)
        else:
            frame = array_picture(raw, name, limits, given.axis)
        first = first or frame.shape
        if frame.shape != first:
            raise MediaError(
                f"{name} is {frame.shape[1]}x{frame.shape[0]} but frame 0 is "
                f"{first[1]}x{first[0]}: resize them to one size"
            )
        yield i, frame, time


def _hold(given: _FrameOptions, limits: Limits) -> Iterator[Any]:
    """Convert an iterator's frames, within the budget: an endless one must end in an error."""
    for i, frame, time in _convert(given, limits):
        limits.check_frames(given.name, i + 1)
        limits.check_decoded(given.name, i + 1, frame.shape[1], frame.shape[0])
        yield frame if time is None else (frame, time)


def _times(stamps: list[float | None], rate: float, name: str) -> tuple[Floats, float, int]:
    """Times of the frames in seconds [n], when the last one ends, and how many were mended."""
    known = [stamp for stamp in stamps if stamp is not None]
    if not known:
        return np.arange(len(stamps)) / rate, len(stamps) / rate, 0
    wrong = f"{name} has no usable times: every frame needs a time, ascending and finite, or none"
    if len(known) != len(stamps) or not np.isfinite(known).all():
        raise MediaError(wrong)
    events: Counter[str] = Counter()
    try:
        times = np.array([time for _, time in rising(((0, time) for time in known), name, events)])
    except MediaError:
        raise MediaError(wrong) from None
    stay = times[-1] - times[-2] if len(times) > 1 else 1 / rate
    return times, float(times[-1] + stay), events["mended"]
