"""Frames of one size at rising times, from sources with irregular sizes and clocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from PIL import Image

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Frame
from mmfast.frontends.source import first_line

_BROKEN = 30  # pictures in a row that cannot be used before the source is given up
_STILL = 1000  # frames in a row at one time, after which the clock counts as stopped
_LATE = 1.0  # seconds; largest delay of frames that come out of order
_LATE_RUN = 2  # ... and not more of them in a row: then the clock was set back
_SAME = 1e-9  # seconds
_LEAST = 1e-3  # seconds between two frames without times of their own
_FAR = 1e10  # seconds; later times (three centuries) are refused


class SteadyTimes:
    """Rising times from the times of a source.

    A frame at the time of the one before is dropped (`repeated`), and so is one up to a second
    before it (`late`). Further back, or for the third such frame in a row, the source's clock was
    set back: time continues from the last frame (`jumps`). Gaps and late starts are kept. `events`
    holds the counts, and `rate` gives times to frames without.
    """

    def __init__(self, name: str, events: Counter[str], rate: float) -> None:
        self._name, self._events, self._rate = name, events, rate
        self._gap = 1 / rate
        self._last: float | None = None
        self._shift = 0.0
        self._late = self._still = 0

    def place(self, time: float | None) -> float | None:
        """Return the time at which to show a frame, None to drop it; refuse a clock that stands."""
        last = self._last
        if time is None:
            at = 0.0 if last is None else last + 1 / self._rate
        else:
            at = time + self._shift
        if last is None or at > last + _SAME:
            return self._accept(at)
        if at >= last - _SAME:
            self._repeated(at)
            return None
        if last - at <= _LATE and self._late < _LATE_RUN:
            self._late += 1
            self._events["late"] += 1
            return None
        self._events["jumps"] += 1
        self._shift += last + self._gap - at
        return self._accept(last + self._gap)

    def _accept(self, at: float) -> float:
        if self._last is not None:
            self._gap = min(max(at - self._last, _LEAST), _LATE)
        self._late = self._still = 0
        self._last = at
        return at

    def _repeated(self, at: float) -> None:
        self._still += 1
        self._events["repeated"] += 1
        if self._still >= _STILL:
            raise MediaError(
                f"the clock of {self._name} stands still: {_STILL} frames at {at:g} s; "
                f"give frames without times and a rate="
            )


def steady(
    items: Iterable[tuple[Any, float | None]],
    convert: Callable[[Any], Frame],
    name: str,
    events: Counter[str],
    rate: float,
) -> Iterator[tuple[Frame, float]]:
    """Yield usable frames of one size at rising times.

    A picture that `convert` refuses is skipped (`broken`); one of another size is scaled into the
    first one's, with black bars (`resized`). Thirty broken ones in a row, a source without a usable
    one, and a stopped clock are a MediaError.
    """
    timeline = SteadyTimes(name, events, rate)
    shape: tuple[int, ...] | None = None
    in_a_row, reason = 0, "it is empty"
    for raw, time in items:
        try:
            if time is not None and not abs(time) < _FAR:  # NaN too
                raise MediaError(f"its time is {time}")
            frame = convert(raw)
        except MediaError as error:
            events["broken"] += 1
            in_a_row, reason = in_a_row + 1, first_line(error)
            if in_a_row >= _BROKEN:
                raise MediaError(
                    f"{name} gave {in_a_row} broken frames in a row: {reason}"
                ) from None
            continue
        in_a_row = 0
        at = timeline.place(time)
        if at is None:
            continue
        shape = shape or frame.shape
        if frame.shape != shape:
            events["resized"] += 1
            frame = fit(frame, shape[1], shape[0])
        yield frame, at
    if shape is None:
        raise MediaError(f"{name} gave no usable frame ({reason}): check the source")


def fit(frame: Frame, width: int, height: int) -> Frame:
    """Scale a picture [h, w, 3] into [height, width, 3], centred, its shape kept."""
    share = min(width / frame.shape[1], height / frame.shape[0])
    inner = max(1, round(frame.shape[1] * share)), max(1, round(frame.shape[0] * share))
    scaled = np.asarray(Image.fromarray(frame).resize(inner, Image.Resampling.BILINEAR))
    left, top = (width - inner[0]) // 2, (height - inner[1]) // 2
    out = np.zeros((height, width, 3), np.uint8)
    out[top : top + inner[1], left : left + inner[0]] = scaled
    return out


def at_rate(
    pairs: Iterable[tuple[Frame, float]], fps: float | None
) -> Iterator[tuple[Frame, float]]:
    """Yield the first frame at or after every 1/fps s since the first, as soon as it comes.

    `sample_stream` takes the one on screen at each instant, which is known one frame later.
    """
    start: float | None = None
    due = 0
    for frame, time in pairs:
        start = time if start is None else start
        passed = 0 if fps is None else math.floor((time - start) * fps + 1e-6)
        if fps is None or passed >= due:
            due = passed + 1
            yield frame, time
