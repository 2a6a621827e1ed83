"""Read long files in parallel: slices that begin at key frames, each decoded by one thread.

FFmpeg's own frame threads wait for each other and decode every frame. Here a thread decodes a
slice alone, leaves out what no wanted frame refers to, and FFmpeg releases the interpreter's lock
meanwhile. Every packet and frame is checked against the plan; where the stream does not behave as
planned, `Mismatch` sends the caller back to decoding from the start.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from mmfast.frontends.container import Header
from mmfast.frontends.guard import refusing
from mmfast.frontends.limits import Limits
from mmfast.frontends.long_file_plan import Job
from mmfast.frontends.long_file_queue import Ahead, Ordered, Stopped
from mmfast.frontends.long_file_slice import SliceReader, slice_reader
from mmfast.frontends.source import Source

_WORTH = 100e6  # pixels to decode; below, opening the file again costs more than it saves
SLICE = 48  # packets that are worth a thread's while
_MOST = 8  # threads; each holds a decoder with its own reference pictures
_DECODERS = 1 << 30  # bytes of reference pictures of all threads together
_REFERENCES = 20  # pictures that a decoder may hold
_KINDS = frozenset(("mp4", "mkv"))
_CODECS = frozenset(("h264", "hevc", "av1", "libdav1d", "vp9"))  # one packet is one frame

Convert = Callable[[Any, int], tuple[Any, int]]  # frame and tick to item and bytes


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def crew_size(pixels: int) -> int:
    """How many threads to decode pictures of so many pixels with."""
    decoder = _REFERENCES * pixels * 3 // 2
    return max(1, min(cores(), _MOST, _DECODERS // max(decoder, 1)))


def suits(source: Source, header: Header) -> bool:
    """Whether the packets of a file can be planned; what it holds shows while planning."""
    return source.kind in _KINDS and header.progressive and header.codec in _CODECS


def worth(packets: float, pixels: int) -> bool:
    """Whether decoding is long enough to be shared."""
    return packets * pixels >= _WORTH


@dataclass
class Crew:
    """Threads that decode the slices of one file, each slice into its own lane.

    Attributes:
        slices: Lists of jobs, drawn by whichever thread is free.
        convert: Called by the threads, in any order.
        workers: Threads.
    """

    source: Source
    limits: Limits
    slices: Iterator[list[Job]]
    convert: Convert
    workers: int
    ahead: Ahead
    close: Callable[[], object] = lambda: None  # lets go of what the planner holds

    def __post_init__(self) -> None:
        self.order = Ordered(self.ahead)
        self._lock = threading.Lock()
        self._lanes = 0

    def items(self) -> Iterator[Any]:
        """Yield what `convert` makes of every wanted frame, in order.

        Raises:
            Mismatch: Behind the items before it, the stream is not as planned.
            MediaError: ... it is broken, or the limits are spent.
        """
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
                with slice_reader(self.source, self.limits, style) as reader:
                    while jobs is not None:
                        self._decode(reader, lane, jobs)
                        self.order.end(lane)
                        lane, jobs = self._draw()
        except BaseException as error:
            self.order.end(lane, error)

    def _draw(self) -> tuple[int, list[Job] | None]:
        """The next slice and its lane; an error of the planner ends that lane."""
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

    def _decode(self, reader: SliceReader, lane: int, jobs: list[Job]) -> None:
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
    source: Source,
    limits: Limits,
    slices: Generator[list[Job], None, None],
    convert: Convert,
    ahead: Ahead,
    pixels: int,
) -> Crew:
    """Choose how to decode: slices side by side where what must wait fits, else one by one.

    Raises:
        Mismatch: The stream cannot be planned from its start.
    """
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
    return Crew(source, limits, chain(known, slices), convert, workers, ahead, slices.close)
