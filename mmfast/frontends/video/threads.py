"""Parallel decoding of long files: slices that begin at key frames, each decoded by one thread.

Packets that no wanted frame refers to are left out. Every packet and frame is checked against the
plan; where the stream differs, `Mismatch` asks the caller to decode from the start.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import av
import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Frame, Frames, Orientation, write_rgb
from mmfast.frontends.container import Header, open_video
from mmfast.frontends.sampling import Indices, sample_stream
from mmfast.frontends.source import Damage, Limits, MediaSource, Mismatch, refusing
from mmfast.frontends.video import packets
from mmfast.frontends.video.packets import Facts, PacketGroup, SliceJob, SliceReader


@dataclass(frozen=True)
class Ahead:
    """Decoded frames that may wait for their consumer; both figures hold."""

    frames: int = 128  # number of frames
    bytes: int = 256 << 20  # their RGB bytes together. A single larger frame passes alone

    def __post_init__(self) -> None:
        if self.frames < 1 or self.bytes < 1:
            raise MediaError(
                f"ahead={self.frames} frames, {self.bytes} bytes: give at least 1 of each"
            )

    def full(self, frames: int, size: int) -> bool:
        """Return True if another frame has to wait."""
        return frames >= self.frames or (frames > 0 and size >= self.bytes)


DEFAULT_AHEAD = Ahead()


class Stopped(Exception):  # noqa: N818 - ends a thread, never reaches a caller
    """The consumer has stopped."""


@dataclass
class LaneQueue:
    """Bounded queue of several producers, read lane after lane: lane 0 to its end, then lane 1.

    The lane that is read may always add one item, so that the bound never blocks its producer.
    """

    ahead: Ahead
    _lanes: dict[int, deque[Any]] = field(default_factory=dict)
    _ended: dict[int, BaseException | None] = field(default_factory=dict)
    _turn: int = 0
    _lanes_end: int | None = None
    _frames: int = 0
    _bytes: int = 0
    _peak: tuple[int, int] = (0, 0)
    _stopped: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    @property
    def stopped(self) -> bool:
        """True if producers should stop."""
        return self._stopped

    @property
    def peak(self) -> tuple[int, int]:
        """Most frames and bytes that have waited at once."""
        return self._peak

    def put(self, lane: int, item: Any, size: int) -> None:
        """Add an item of `size` bytes to a lane; wait for room; `Stopped` once the consumer has."""
        with self._changed:
            mine = self._lanes.setdefault(lane, deque())
            self._changed.wait_for(lambda: self._stopped or self._room(lane, mine, size))
            if self._stopped:
                raise Stopped
            mine.append((item, size))
            self._frames, self._bytes = self._frames + 1, self._bytes + size
            self._peak = (max(self._peak[0], self._frames), max(self._peak[1], self._bytes))
            self._changed.notify_all()

    def _room(self, lane: int, mine: deque[Any], size: int) -> bool:
        free = not self.ahead.full(self._frames, self._bytes + size - 1)
        return free or (lane == self._turn and not mine)

    def end(self, lane: int, error: BaseException | None = None) -> None:
        """Close a lane; the consumer gets `error` after the items before it."""
        with self._changed:
            self._ended[lane] = error
            self._changed.notify_all()

    def stop(self) -> None:
        """Make every producer's next `put` raise `Stopped`, and drop waiting items."""
        with self._changed:
            self._stopped = True
            self._lanes.clear()
            self._changed.notify_all()

    def finish(self, lanes: int) -> None:
        """Set the number of lanes."""
        with self._changed:
            self._lanes_end = lanes
            self._changed.notify_all()

    def drain(self) -> Iterator[Any]:
        """Yield the items of all lanes in order; raise the first error met."""
        while True:
            with self._changed:
                self._changed.wait_for(self._ready)
                if self._turn == self._lanes_end:
                    return
                mine = self._lanes.get(self._turn)
                if not mine:
                    error = self._ended.pop(self._turn)
                    self._lanes.pop(self._turn, None)
                    self._turn += 1
                    self._changed.notify_all()
                    if error is not None:
                        raise error
                    continue
                item, size = mine.popleft()
                self._frames, self._bytes = self._frames - 1, self._bytes - size
                self._changed.notify_all()
            yield item

    def _ready(self) -> bool:
        waits = bool(self._lanes.get(self._turn)) or self._turn in self._ended
        return waits or self._turn == self._lanes_end


_WORTH = 100e6  # pixels to decode; below, opening the file again costs more than it saves
SLICE = 48  # least packets of a slice
_MOST = 8  # threads; each holds a decoder with its own reference pictures
_DECODERS = 1 << 30  # bytes of reference pictures of all threads together
_REFERENCES = 20  # pictures that a decoder may hold
_KINDS = frozenset(("mp4", "mkv"))
_CODECS = frozenset(("h264", "hevc", "av1", "libdav1d", "vp9"))  # one packet is one frame

Convert = Callable[[Any, int], tuple[Any, int]]  # frame and tick to item and bytes


def cores() -> int:
    """Number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crew_size(pixels: int) -> int:
    """Number of threads to decode pictures of `pixels` pixels with."""
    decoder = _REFERENCES * pixels * 3 // 2
    return max(1, min(cores(), _MOST, _DECODERS // max(decoder, 1)))


def suits(source: MediaSource, header: Header) -> bool:
    """Return True if the kind and codec of a file allow a plan by packets."""
    return source.kind in _KINDS and header.progressive and header.codec in _CODECS


def worth(count: float, pixels: int) -> bool:
    """Return True if decoding is long enough for several threads."""
    return count * pixels >= _WORTH


@dataclass
class SliceThreads:
    """Threads that decode the slices of one file, each slice into its own lane."""

    source: MediaSource
    limits: Limits
    slices: Iterator[list[SliceJob]]  # lists of jobs, drawn by the next free thread
    convert: Convert  # called by the threads, in any order
    workers: int  # number of threads
    ahead: Ahead
    close: Callable[[], object] = lambda: None  # releases the planner's file

    def __post_init__(self) -> None:
        self.order = LaneQueue(self.ahead)
        self._lock = threading.Lock()
        self._lanes = 0

    def items(self) -> Iterator[Any]:
        """Yield the results of `convert` for every wanted frame, in order, before any error."""
        threads = [
            threading.Thread(target=self._work, name="mmfast-slice", daemon=True)
            for _ in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        try:
            yield from self.order.drain()
        finally:
            self.order.stop()
            for thread in threads:
                thread.join()
            self.close()

    def _work(self) -> None:
        # One decoder for a single thread may use FFmpeg's own threads.
        style = "NONE" if self.workers > 1 else "AUTO"
        lane = 0
        try:
            with suppress(Stopped):
                lane, jobs = self._draw()
                if jobs is None:
                    return
                with packets.slice_reader(self.source, self.limits, style) as reader:
                    while jobs is not None:
                        self._decode(reader, lane, jobs)
                        self.order.end(lane)
                        lane, jobs = self._draw()
        except BaseException as error:
            self.order.end(lane, error)

    def _draw(self) -> tuple[int, list[SliceJob] | None]:
        """Return the next slice and its lane; an error of the planner ends that lane."""
        with self._lock:
            if self.order.stopped:
                raise Stopped
            try:
                jobs = next(self.slices, None)
            except Exception as error:
                self.slices = iter(())
                self.order.end(self._lanes, error)
                self._lanes += 1
                jobs = None
            if jobs is None:
                self.order.finish(self._lanes)
                return self._lanes, None
            self._lanes += 1
            return self._lanes - 1, jobs

    def _decode(self, reader: SliceReader, lane: int, jobs: list[SliceJob]) -> None:
        for job in jobs:
            for frame, tick in reader.frames(job, self._go_on):
                with refusing(self.source.name):
                    item, size = self.convert(frame, tick)
                self.order.put(lane, item, size)
        if self.order.stopped:
            raise Stopped

    def _go_on(self) -> bool:
        return not self.order.stopped


def crew(
    source: MediaSource,
    limits: Limits,
    slices: Generator[list[SliceJob], None, None],
    convert: Convert,
    ahead: Ahead,
    pixels: int,
) -> SliceThreads:
    """Choose the number of threads: several where their waiting frames fit, else one."""
    workers = crew_size(pixels)
    first = next(slices, None)
    second = next(slices, None) if first is not None and workers > 1 else None
    if first is None or second is None:
        workers = 1
    else:
        kept = max(sum(len(job.wanted) for job in part) for part in (first, second))
        room = min(ahead.frames, ahead.bytes // (3 * pixels))
        workers = max(1, min(workers, 1 + room // max(1, kept)))
    known = [part for part in (first, second) if part is not None]
    return SliceThreads(source, limits, chain(known, slices), convert, workers, ahead, slices.close)


_KEPT = 16  # frames of a slice of short groups
_UNBOUND = Ahead(frames=1 << 60, bytes=1 << 60)


def scan(
    source: MediaSource, limits: Limits, header: Header
) -> Iterator[tuple[int | None, bool, Facts]]:
    """Yield packets of a file lazily; `Mismatch` without facts, `Damage` if one is broken."""
    look = packets.unit_reader(header)
    if look is None:
        raise Mismatch
    with open_video(source, limits, "SLICE") as (container, stream):
        try:
            for number, packet in enumerate(container.demux(stream)):
                if packet.size:
                    if packet.is_corrupt:
                        raise Damage
                    if number >= limits.frames:
                        raise Mismatch
                    yield packet.pts, not packet.is_discard, look(packet)
        except av.FFmpegError as error:
            raise Damage from error


def sampled(
    source: MediaSource,
    limits: Limits,
    header: Header,
    turn: Orientation,
    size: tuple[int, int],
    fps: float,
    tolerance: float,
    ahead: Ahead,
) -> Iterator[tuple[Frame, float]]:
    """Yield the frames that `sample_stream` takes of a file, decoded in parallel.

    Packets are listed only as far as the threads need. `Mismatch` asks to decode from the start.
    """
    seen: deque[PacketGroup] = deque()

    def ticks() -> Iterator[tuple[int, float]]:
        for group in packets.groups(scan(source, limits, header)):
            seen.append(group)
            shown = group.ticks
            yield from zip(shown.tolist(), header.seconds(shown).tolist(), strict=True)

    def convert(frame: Any, tick: int) -> tuple[tuple[Frame, float], int]:
        rgb = np.empty((size[1], size[0], 3), np.uint8)
        write_rgb(frame, rgb, turn, source.name)
        return (rgb, float(header.seconds(tick))), rgb.nbytes

    wanted = (tick for tick, _ in sample_stream(ticks(), fps, tolerance))
    planned = packets.jobs(packets.with_wanted(wanted, seen))
    parts = packets.slices(planned, SLICE, _KEPT)
    yield from crew(source, limits, parts, convert, ahead, size[0] * size[1]).items()


def fill(
    source: MediaSource,
    limits: Limits,
    found: tuple[PacketGroup, ...],
    ticks: Indices,
    turn: Orientation,
    out: Frames,
) -> bool:
    """Fill `out` [m, H, W, 3] with the frames at `ticks` [m] (ascending), in parallel.

    False where threads would not pay. `Mismatch` asks to decode from the start.
    """
    pixels = out.shape[1] * out.shape[2]
    workers = crew_size(pixels)
    planned = packets.jobs(packets.with_wanted(iter(ticks.tolist()), deque(found)))
    parts = list(packets.slices(planned, SLICE, 1 << 60))
    cost = sum(job.cost for part in parts for job in part)
    if min(workers, len(parts)) < 2 or not worth(cost, pixels):
        return False
    place = {tick: row for row, tick in enumerate(ticks.tolist())}

    def convert(frame: Any, tick: int) -> tuple[None, int]:
        write_rgb(frame, out[place[tick]], turn, source.name)
        return None, 0

    for _ in SliceThreads(source, limits, iter(parts), convert, workers, _UNBOUND).items():
        pass
    return True
