"""Sources of frames behind one interface: files, folders, iterators, cameras, addresses."""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmfast.core.errors import MediaError, MmfastError
from mmfast.frontends.clip import Frame
from mmfast.frontends.image import is_array, is_sequence, picture
from mmfast.frontends.live.inputs import (
    Allowed,
    check_address,
    open_camera,
    open_http,
    open_rtsp,
    open_screen,
    running_frames,
    running_rgb,
)
from mmfast.frontends.sampling import positive_rate
from mmfast.frontends.source import DEFAULT_LIMITS, Limits, first_line, is_encoded, quote
from mmfast.frontends.video.reader import iter_video
from mmfast.frontends.video.sequences import DEFAULT_RATE, split_pair
from mmfast.frontends.video.threads import DEFAULT_AHEAD, Ahead

_BROKEN = 30  # pictures in a row that cannot be used before the source is given up
_STILL = 1000  # frames in a row at one time, after which the clock counts as stopped
_LATE = 1.0  # seconds; largest delay of frames that come out of order
_LATE_RUN = 2  # ... and not more of them in a row: then the clock was set back
_SAME = 1e-9  # seconds
_LEAST = 1e-3  # seconds between two frames without times of their own
FAR = 1e10  # seconds; later times (three centuries) are refused


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
    for raw, stamp in items:
        try:
            if stamp is not None and not abs(stamp) < FAR:  # NaN too
                raise MediaError(f"its time is {stamp}")
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
        at = timeline.place(stamp)
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
    for frame, at in pairs:
        start = at if start is None else start
        passed = 0 if fps is None else math.floor((at - start) * fps + 1e-6)
        if fps is None or passed >= due:
            due = passed + 1
            yield frame, at


_HELD = 64


class FrameQueue:
    """Bounded queue from one thread to another, with an end that may carry an error."""

    def __init__(self, held: int) -> None:
        self._held = held
        self._queue: deque[Any] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()

    def put(self, item: Any, patience: float | None = None) -> bool:
        """Add an item; False: no room within `patience` seconds; EOFError: the queue has ended."""
        with self._changed:
            room = self._changed.wait_for(
                lambda: self._ended or len(self._queue) < self._held, patience
            )
            if self._ended:
                raise EOFError
            if room:
                self._queue.append(item)
                self._changed.notify_all()
            return room

    def take(self, patience: float | None = None) -> Any:
        """Return the next item; raise the end's error, StopIteration, or TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue or self._ended, patience):
                raise TimeoutError
            if self._queue:
                self._changed.notify_all()
                return self._queue.popleft()
            error, self._error = self._error, None
            raise error if error is not None else StopIteration

    def end(self, error: BaseException | None = None) -> None:
        """End the queue; with `error`, `take` raises it after the waiting items."""
        with self._changed:
            if not self._ended:
                self._error, self._ended = error, True
            self._changed.notify_all()

    def close(self) -> None:
        """End the queue and drop the waiting items; safe from any thread."""
        with self._changed:
            self._ended, self._error = True, None
            self._queue.clear()
            self._changed.notify_all()


class Push(FrameQueue, Iterator[tuple[Any, float]]):
    """Frames pushed by one thread and iterated by another; `end` finishes the iteration.

    A frame without a time gets the seconds since the first push; at most `held` frames wait.
    """

    interrupt = FrameQueue.close

    def __init__(self, held: int = _HELD) -> None:
        super().__init__(held)
        self._begin: float | None = None

    def push(self, frame: Any, time: float | None = None, patience: float | None = None) -> bool:
        """Add a frame; False where there is no room within `patience` seconds (None: no limit)."""
        at = self._now() if time is None else float(time)
        try:
            return self.put((frame, at), patience)
        except EOFError:
            raise MediaError(
                "frames are pushed into a source that has ended: open a new one"
            ) from None

    def _now(self) -> float:
        now = time.monotonic()
        self._begin = now if self._begin is None else self._begin
        return now - self._begin

    def __next__(self) -> tuple[Any, float]:
        pair: tuple[Any, float] = self.take()
        return pair


_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".avif"))


def natural_key(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that puts ``frame2`` before ``frame10``; ties by the number's length."""
    parts = re.split(r"(\d+)", name.casefold(), flags=re.ASCII)
    return tuple(
        (int(part), len(part), "") if part.isdecimal() else (-1, 0, part) for part in parts
    )


def folder_frames(folder: Path, limits: Limits) -> Iterator[Path]:
    """Return the pictures of a directory, without its subdirectories and hidden files."""
    name = quote(folder)
    try:
        files = [
            path
            for path in folder.iterdir()
            if path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
        ]
    except OSError as error:
        raise MediaError(
            f"{name} cannot be listed ({error.strerror}): check its permissions"
        ) from None
    limits.check_frames(name, len(files))
    if not files:
        raise MediaError(
            f"{name} holds no picture: give a directory of {', '.join(sorted(_SUFFIXES))} files"
        )
    return iter(sorted(files, key=lambda path: natural_key(path.name)))


_WAITING = 4  # items that wait for the consumer; a camera's own buffer drops what does not fit


class Pump(FrameQueue, Iterator[Any]):
    """Items of a source that may stall, in order, each within `timeout` seconds of the request.

    After a stall or `close` a thread blocked in foreign code ends when its call returns, and never
    keeps the process alive. Without a timeout only `close` from another thread ends the wait.
    """

    def __init__(self, items: Iterable[Any], name: str, timeout: float | None) -> None:
        super().__init__(_WAITING)
        self._items, self._name, self._timeout = items, name, timeout
        self._thread = threading.Thread(target=self._read, name="mmfast-source", daemon=True)
        self._thread.start()

    def __next__(self) -> Any:
        try:
            return self.take(self._timeout)
        except TimeoutError:
            self.close()
            raise MediaError(
                f"{self._name} gave no frame for {self._timeout:g} s: check that it is "
                f"on and reachable, or raise timeout="
            ) from None

    def _read(self) -> None:
        error: BaseException | None = None
        items: Iterator[Any] = iter(())
        try:
            items = iter(self._items)
            for item in items:
                self.put(item)
        except Exception as caught:  # raised again at the consumer, unless it closed the queue
            error = caught
        with suppress(Exception):
            getattr(items, "close", lambda: None)()
        self.end(error)


_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://", re.ASCII)
_CAMERA, _SCREEN = "camera:", "screen"
_SHOTS = 10.0  # pictures of a screen a second, where no rate is asked for
_TIMEOUT = 10.0  # seconds, of cameras and addresses


class LiveSource(Iterator[tuple[Frame, float]]):
    """Frames [H, W, 3] uint8 of one source at rising times in seconds.

    `events` counts irregularities: ``broken``, ``repeated``, ``late``, ``jumps``, ``resized``,
    ``mended``.
    """

    def __init__(
        self,
        name: str,
        pairs: Iterator[tuple[Frame, float]],
        events: Counter[str],
        stop: Callable[[], object],
    ) -> None:
        self.name, self.events, self.frames = name, events, 0
        self._pairs, self._stop = pairs, stop

    def __next__(self) -> tuple[Frame, float]:
        try:
            pair = next(self._pairs)
        except (StopIteration, MmfastError):
            self.interrupt()
            raise
        except Exception as error:  # an iterator's own, or a connection's
            self.interrupt()
            raise MediaError(
                f"{self.name} died after {self.frames} frames ({first_line(error)}): open it again"
            ) from error
        self.frames += 1
        return pair

    def interrupt(self) -> None:
        """End a `next` that waits for the source; safe from any thread."""
        with suppress(Exception):
            self._stop()

    def close(self) -> None:
        """Stop the source and release it; only from the thread that iterates."""
        self.interrupt()
        close: Any = getattr(self._pairs, "close", None)
        if close is not None:
            close()

    def __del__(self) -> None:
        self.interrupt()  # else the thread that reads ahead would wait without end

    def __enter__(self) -> LiveSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Raw:
    """A source before its frames are converted and timed."""

    name: str
    items: Iterable[Any]  # pictures, or (picture, seconds or None) pairs
    convert: Callable[[Any], Frame]
    live: bool = True  # may stall: read by a thread
    exact: bool = False  # `fps` is applied already
    timeout: float | None = None


def live_frames(
    source: object,
    *,
    fps: float | None = None,
    rate: float | None = None,
    allow_network: Allowed = False,
    limits: Limits = DEFAULT_LIMITS,
    ahead: Ahead | int = DEFAULT_AHEAD,
    timeout: float | None = None,
) -> LiveSource:
    """Open any source of frames; arguments and headers are checked at once.

    A source is a path, bytes or file object of a video; a directory of pictures, in natural order;
    an array, list or iterator of pictures or (picture, seconds) pairs, such as `Push`; a camera's
    number or ``camera:NAME``; ``screen`` or ``screen:DISPLAY``; an rtsp, rtsps, http or https URL.
    Files give the frames that
    ``read_video(file, fps=fps)`` gives, read in parallel where their groups of pictures allow it.
    Other sources give the first frame at or after every 1/fps s.

    Irregularities: a frame at the time of the one before, or up to a second earlier, is dropped; a
    clock that jumps back further continues from the last frame; a picture of another size is scaled
    into the first one's; a broken picture is skipped; each is counted in `events`. Frames of files
    whose times do not rise are `mended` instead, as in `read_video`. Thirty broken
    pictures in a row, a stopped clock, and a source that gives nothing within `timeout` or breaks
    off, end in a `MediaError` after the frames before. Late starts and gaps are kept.

    Frames without times come at `rate` per second, 24 if not given. `allow_network` is False, True
    for public hosts, or a list of hosts: these only, private ones too. Of a file, `ahead` decoded
    frames may wait. `timeout` is the longest wait for a frame in seconds; None is 10 s for cameras
    and URLs, no limit for the rest.
    """
    step = None if fps is None else positive_rate("fps", fps)
    speed = DEFAULT_RATE if rate is None else positive_rate("rate", rate)
    if timeout is not None and not 0 < timeout < float("inf"):
        raise MediaError(f"timeout={timeout!r} is not a delay: give seconds such as 10")
    bound = Ahead(frames=ahead) if isinstance(ahead, int) else ahead
    events: Counter[str] = Counter()
    raw = _open(source, step, rate, allow_network, limits, bound, timeout, events)
    items: Any = raw.items
    wait = raw.timeout if timeout is None else timeout
    pump = Pump(items, raw.name, wait) if raw.live or wait is not None else None
    timed = (split_pair(item) for item in (items if pump is None else pump))
    pairs: Any = steady(timed, raw.convert, raw.name, events, speed)
    pairs = pairs if raw.exact else at_rate(pairs, step)
    return LiveSource(raw.name, pairs, events, lambda: _stop(pump, source))


def _stop(pump: Pump | None, source: object) -> None:
    if pump is not None:
        pump.close()
        close: Any = getattr(source, "interrupt", None)
        if close is not None:
            close()


def _display(source: str) -> str | None:
    """Return the display that a source names, "" for that of the session; None for other sources.

    A file of the name goes first.
    """
    word, colon, display = source.partition(":")
    if word != _SCREEN or Path(source).exists():
        return None
    return display if colon else ""


def _open(
    source: Any,
    fps: float | None,
    rate: float | None,
    allowed: Allowed,
    limits: Limits,
    ahead: Ahead,
    timeout: float | None,
    events: Counter[str],
) -> _Raw:
    wait = _TIMEOUT if timeout is None else timeout
    camera: int | str | None = None
    if isinstance(source, int) and not isinstance(source, bool):
        camera = source
    if isinstance(source, str) and source.startswith(_CAMERA):
        camera = source[len(_CAMERA) :]
    if camera is not None:
        return _running(f"camera {camera}", open_camera(camera, wait), limits, wait)
    if isinstance(source, str) and (display := _display(source)) is not None:
        opened = open_screen(display, wait, fps or _SHOTS)
        if isinstance(opened, Iterator):  # pictures and seconds
            return _Raw("the screen", opened, _picture("the screen", limits), timeout=wait)
        return _running("the screen", opened, limits, wait)
    if isinstance(source, str) and _URL.match(source):
        return _address(source, allowed, limits, wait)
    if isinstance(source, str | os.PathLike) and (folder := Path(os.fsdecode(source))).is_dir():
        convert = _picture(f"a file of {quote(folder)}", limits)
        return _Raw(quote(folder), folder_frames(folder, limits), convert, live=False)
    if is_encoded(source) or is_array(source) or not is_sequence(source):
        pairs = iter_video(source, fps=fps, limits=limits, rate=rate, ahead=ahead, events=events)
        name = quote(source) if isinstance(source, str | os.PathLike) else "the video"
        return _Raw(name, pairs, lambda frame: frame, live=False, exact=True)
    listed = isinstance(source, list | tuple)
    name = "the list of frames" if listed else "the frame iterator"
    return _Raw(name, source, _picture(f"a frame of {name}", limits), live=not listed)


def _picture(name: str, limits: Limits) -> Callable[[Any], Frame]:
    return lambda raw: picture(raw, name, limits)


def _address(text: str, allowed: Allowed, limits: Limits, timeout: float) -> _Raw:
    address = check_address(text, allowed)
    if address.url.scheme.startswith("http"):
        container, file = open_http(text, allowed, limits, timeout)
        return _running(file.address.name, container, limits, timeout, file)
    return _running(address.name, open_rtsp(address, timeout), limits, timeout)


def _running(name: str, container: Any, limits: Limits, timeout: float, file: Any = None) -> _Raw:
    items = running_frames(container, name, limits, file)
    return _Raw(name, items, lambda frame: running_rgb(frame, name, limits), timeout=timeout)
