"""Choice of frames by a count, a rate or explicit times, over the frames' true times."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mmfast.core.errors import MediaError

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
T = TypeVar("T")
logger = logging.getLogger("mmfast")

_SPREAD = "%s: frame %d has no later time than before; such are spread between their neighbours"
_RUN = 16  # frames in a row without a later time: more, and the clock is broken


@dataclass(frozen=True)
class Ask:
    """Request for frames; exactly one field is set."""

    frames: int | None = None
    fps: float | None = None
    times: tuple[float, ...] | None = None

    @classmethod
    def parse(cls, frames: object, fps: object, times: object) -> Ask:
        """Check the three arguments of `read_video`, of which exactly one has to be given."""
        given = {"frames": frames, "fps": fps, "times": times}
        named = [f"{key}={value!r}" for key, value in given.items() if value is not None]
        if len(named) != 1:
            raise MediaError(
                f"give exactly one of frames, fps and times, got {_short(', '.join(named))}: "
                f"frames=8 spreads 8 over the clip, fps=2 takes 2 per second, times=[0.5, 2.0]"
            )
        if frames is not None:
            return cls(frames=_count(frames))
        if fps is not None:
            return cls(fps=positive_rate("fps", fps))
        return cls(times=_times(times))

    def choose(self, name: str, times: Floats, end: float, tolerance: float) -> Indices:
        """Choose among frames shown from `times[i]` until the next one (the last until `end`).

        ``frames=k`` is ``round(linspace(0, n - 1, k))``, all n frames if the clip has no more;
        ``fps=r`` the frame on screen at 0, 1/r, 2/r, ... seconds after the first frame, once if it
        is there for several of these instants; ``times=[...]`` the frame on screen at each, in the
        order asked for. `times` `[n]` is in seconds, `tolerance` half a tick of the source's clock.
        Returns frame numbers [m].
        """
        if self.frames is not None:
            count = min(self.frames, len(times))
            return np.round(np.linspace(0, len(times) - 1, count)).astype(np.int64)
        if self.fps is not None:
            edges = np.append(times, max(end, times[-1] + 2 * tolerance))
            ticks = _ticks(edges - times[0], self.fps, tolerance)
            return np.flatnonzero(ticks[1:] > ticks[:-1]).astype(np.int64)
        wanted = np.asarray(self.times, dtype=np.float64)
        outside = wanted[(wanted < -tolerance) | (wanted > end + tolerance)]
        if len(outside):
            raise MediaError(
                f"time {outside[0]:g} s is outside {name}, which runs from 0 to {end:.3f} s: "
                f"give times within it"
            )
        found = np.searchsorted(times - tolerance, wanted, side="right") - 1
        return np.maximum(found, 0).astype(np.int64)  # before the first frame it is on screen


def _ticks(since_start: Any, fps: float, tolerance: float) -> Any:
    """Count the sampling instants before a time; instant k lies at k / fps."""
    return np.ceil((since_start - tolerance) * fps)


def sample_stream(
    pairs: Iterable[tuple[T, float]], fps: float | None, tolerance: float
) -> Iterator[tuple[T, float]]:
    """Apply ``fps=r`` to a stream, one item late; None passes everything through."""
    if fps is None:
        yield from pairs
        return
    held: tuple[T, float] | None = None
    start = taken = gap = 0.0
    for pair in pairs:
        if held is None:
            start = pair[1]
        else:
            gap = pair[1] - held[1]
            upto = float(_ticks(pair[1] - start, fps, tolerance))
            if upto > taken:
                yield held
            taken = upto
        held = pair
    # The duration of the last frame is unknown: it is taken for that of the one before it.
    if held and _ticks(held[1] - start + max(gap, 2 * tolerance), fps, tolerance) > taken:
        yield held


def no_times(name: str) -> MediaError:
    """Return the error of a video whose frames cannot be told apart in time."""
    return MediaError(
        f"the frames of {name} have no usable times (0, repeated or running back): re-encode it "
        f"with a rate (ffmpeg -r 30 -i IN OUT.mp4)"
    )


def rising(
    pairs: Iterable[tuple[T, float | None]],
    name: str,
    events: Counter[str],
    restart: float = math.inf,
) -> Iterator[tuple[T, Any]]:
    """Yield items at rising times: those that do not rise share the time up to the next later one.

    Behind the last rising time they keep the distance before it. They are counted as `mended`, and
    the first one warns. An item without a time (None) passes, unless it is among such ones; so does
    one that is more than `restart` earlier, which is for a reader that follows such clocks.
    MediaError where more than 16 in a row do not rise, or all.
    """
    last, gap = -math.inf, math.inf
    stuck: list[T] = []
    for number, (item, time) in enumerate(pairs):
        if time is None and not stuck:
            yield item, None
        elif time is not None and last - time > restart:
            yield from ((each, last + gap * i) for i, each in enumerate(stuck, 1))
            last, stuck = time, []
            yield item, time
        elif time is not None and time > last:
            gap = (time - last) / (len(stuck) + 1)
            yield from ((each, last + gap * i) for i, each in enumerate(stuck, 1))
            last, stuck = time, []
            yield item, time
        else:
            stuck.append(item)
            events["mended"] += 1
            if len(stuck) > _RUN:
                break
            if events["mended"] == 1:
                logger.warning(_SPREAD, name, number)
    if stuck and (math.isinf(gap) or len(stuck) > _RUN):
        raise no_times(name)
    yield from ((each, last + gap * i) for i, each in enumerate(stuck, 1))


def positive_rate(what: str, value: object) -> float:
    """Check a rate in frames per second."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):
            rate = float(value)
            if math.isfinite(rate) and rate > 0:
                return rate
    raise MediaError(
        f"{what}={_short(repr(value))} is not a rate: give a positive number such as 2"
    )


def _count(value: object) -> int:
    if not isinstance(value, bool) and isinstance(value, Integral) and int(value) > 0:
        return int(value)
    raise MediaError(
        f"frames={_short(repr(value))} is not a count: give a positive whole number such as 8"
    )


def _times(value: object) -> tuple[float, ...]:
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0)
    if array.ndim != 1 or not len(array) or not np.isfinite(array).all():
        raise MediaError(
            f"times={_short(repr(value))} is not a list of seconds: give times such as [0.5, 2.0]"
        )
    return tuple(array.tolist())


def _short(text: str) -> str:
    line = " ".join(text.split())
    return (line if len(line) <= 80 else line[:77] + "...") or "none"
