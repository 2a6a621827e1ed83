"""Decode the jobs of one slice: read, check that the packets are those planned, keep the frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import av

from mmfast.frontends.container import open_video
from mmfast.frontends.guard import Damage, refusing
from mmfast.frontends.limits import Budget, Limits
from mmfast.frontends.long_file_plan import Job
from mmfast.frontends.source import Source

_NEAR = 64  # packets read over rather than sought past


class SliceReader:
    """One open decoder that does jobs one after the other."""

    def __init__(self, container: Any, stream: Any, budget: Budget) -> None:
        self._container, self._stream, self._budget = container, stream, budget
        self._context = stream.codec_context
        self._packets: Iterator[Any] = container.demux(stream)
        self._at = 0  # number of the packet that comes next

    def frames(self, job: Job, go_on: Callable[[], bool]) -> Iterator[tuple[Any, int]]:
        """Yield the wanted frames with their ticks, in order, while `go_on` says so.

        Raises:
            Damage: A packet or a frame is not the one that was planned, or does not decode.
        """
        left = iter(job.wanted)
        due = next(left)
        for frame in self._decoded(job, go_on):
            if frame.pts is None or frame.is_corrupt or frame.pts > due:
                raise Damage
            if frame.pts == due:
                yield frame, due
                due = next(left, 1 << 62)
        if due != 1 << 62 and go_on():
            raise Damage

    def _decoded(self, job: Job, go_on: Callable[[], bool]) -> Iterator[Any]:
        packet = self._reach(job)
        last = len(job.pts) - 1
        try:
            for number, (pts, send) in enumerate(
                zip(job.pts.tolist(), job.send.tolist(), strict=True)
            ):
                if not go_on():
                    return
                self._budget.clock()
                if packet.pts != pts or packet.is_corrupt:
                    raise Damage
                if send:
                    for frame in self._context.decode(packet):
                        self._budget.frame(frame.width, frame.height)
                        yield frame
                if number < last:
                    packet = self._next()
            yield from self._context.decode(None)
            self._context.flush_buffers()
        except av.FFmpegError as error:
            raise Damage from error

    def _next(self) -> Any:
        packet = next(self._packets, None)
        while packet is not None and not packet.size:
            packet = next(self._packets, None)
        if packet is None:
            raise Damage
        self._at += 1
        return packet

    def _reach(self, job: Job) -> Any:
        """The job's first packet."""
        try:
            if 0 <= job.first - self._at <= _NEAR:
                for _ in range(job.first - self._at):
                    self._next()
                return self._next()
            entry = int(job.pts[0])
            self._container.seek(entry, stream=self._stream)
            self._packets = self._container.demux(self._stream)
            packet = self._next()
            while packet.pts != entry or not packet.is_keyframe:
                packet = self._next()
        except av.FFmpegError as error:
            raise Damage from error
        self._at = job.first + 1
        return packet


@contextmanager
def slice_reader(source: Source, limits: Limits, threads: str) -> Iterator[SliceReader]:
    """Open a file for reading slices; `threads` NONE keeps the decoder in the calling thread."""
    with open_video(source, limits, threads if threads != "NONE" else "SLICE") as (file, stream):
        if threads == "NONE":
            stream.codec_context.thread_count = 1
        # An error that the decoder would conceal is one to look at: decoding from the start
        # conceals it in another way.
        stream.codec_context.options = {
            "max_pixels": str(limits.pixels),
            "err_detect": "explode",
        }
        with refusing(source.name):
            reader = SliceReader(file, stream, Budget(limits, source.name))
        yield reader
