"""Read a video file: header, index, choice of frames, then the decoder that can do it exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends import decord_reader, pyav_reader
from mmfast.frontends.clip import Clip, make_clip
from mmfast.frontends.container import Header, open_video, read_header
from mmfast.frontends.guard import Damage, Mismatch
from mmfast.frontends.headers import check_header
from mmfast.frontends.index import Index, packet_index
from mmfast.frontends.limits import Limits
from mmfast.frontends.long_file import suits, worth
from mmfast.frontends.long_file_plan import Group
from mmfast.frontends.long_file_queue import DEFAULT_AHEAD, Ahead
from mmfast.frontends.long_file_read import fill, sampled
from mmfast.frontends.picture import Frame, Frames, Orientation
from mmfast.frontends.sampling import Ask, Indices, sample_stream
from mmfast.frontends.source import Source

BACKENDS = ("auto", "decord", "pyav")


@dataclass(frozen=True)
class _Plan:
    """What is known about a file once its packets are listed and its first frame is decoded."""

    source: Source
    ask: Ask
    limits: Limits
    header: Header
    turn: Orientation
    size: tuple[int, int]  # width, height after rotation

    def choose(self, index: Index) -> tuple[Indices, Indices, Frames]:
        """Frame numbers asked for [m], the distinct ones ascending [u], and room for these."""
        times, end = self.header.seconds(index.ticks), float(self.header.seconds(index.end))
        half_tick = float(self.header.time_base) / 2 + 1e-9
        self.limits.check_duration(self.source.name, end - float(times[0]))
        asked = self.ask.choose(self.source.name, times, end, half_tick)
        rows = np.unique(asked)
        self.limits.check_decoded(self.source.name, len(asked), *self.size)
        width, height = self.size
        return asked, rows, np.empty((len(rows), height, width, 3), np.uint8)

    def clip(self, index: Index, asked: Indices, rows: Indices, out: Frames, backend: str) -> Clip:
        """Put the decoded frames [u] into the order asked for."""
        frames = out if len(asked) == len(rows) and (asked == rows).all() else None
        return make_clip(
            frames=out[np.searchsorted(rows, asked)] if frames is None else frames,
            rows=asked,
            times=self.header.seconds(index.ticks),
            end=float(self.header.seconds(index.end)),
            rate=float(self.header.rate),
            source=self.source.name,
            backend=backend,
        )


def read_file(source: Source, ask: Ask, limits: Limits, backend: str) -> Clip:
    """Read the frames asked for; both decoders give the same ones.

    Raises:
        MediaError: The file is broken, empty, too large, or not one that `backend` can read.
    """
    check_header(source)
    with open_video(source, limits) as (container, stream):
        header = read_header(source, container, stream, limits)
        index = packet_index(source, container, stream, header, limits)
    first: Any = pyav_reader.first_frame(source, limits)
    turn = Orientation.of(first)
    plan = _Plan(source, ask, limits, header, turn, turn.size(first.width, first.height))
    reason = decord_reader.why_not(source, header, index, bool(first.interlaced_frame), turn)
    if backend == "decord" and reason:
        raise MediaError(f"decord cannot read {source.name} ({reason}): use backend='auto'")
    if backend != "decord" and index.groups is not None:
        clip = _in_parallel(plan, index, index.groups)
        if clip is not None:
            return clip
    if backend != "pyav" and not reason:
        clip = _with_decord(plan, index)
        if clip is not None:
            return clip
        if backend == "decord":
            raise MediaError(f"decord failed on {source.name}: use backend='auto'")
    return _with_pyav(plan, index)


def _in_parallel(plan: _Plan, index: Index, groups: tuple[Group, ...]) -> Clip | None:
    asked, rows, out = plan.choose(index)
    try:
        done = fill(plan.source, plan.limits, groups, index.ticks[rows], plan.turn, out)
    except Mismatch:
        return None
    return plan.clip(index, asked, rows, out, "pyav") if done else None


def _with_decord(plan: _Plan, index: Index) -> Clip | None:
    asked, rows, out = plan.choose(index)
    try:
        decord_reader.read(plan.source, plan.header, index, rows, out)
    except Mismatch:
        return None
    return plan.clip(index, asked, rows, out, "decord")


def _with_pyav(plan: _Plan, index: Index) -> Clip:
    if index.trusted:
        asked, rows, out = plan.choose(index)
        try:
            pyav_reader.read_exact(plan.source, plan.limits, index, rows, plan.turn, out)
            return plan.clip(index, asked, rows, out, "pyav")
        except Mismatch:
            del out
    index, threads = pyav_reader.count_frames(plan.source, plan.limits, plan.header, index)
    asked, rows, out = plan.choose(index)
    pyav_reader.read_counted(plan.source, plan.limits, rows, plan.turn, out, threads)
    return plan.clip(index, asked, rows, out, "pyav")


def iter_file(
    source: Source, limits: Limits, fps: float | None = None, ahead: Ahead = DEFAULT_AHEAD
) -> Iterator[tuple[Frame, float]]:
    """Yield the frames of a file in turn; damaged packets are skipped.

    Args:
        source: The file.
        limits: Size limits; the wall clock does not count, the consumer sets the pace.
        fps: Takes the frame on screen at every 1/fps s; None takes all.
        ahead: How far a parallel read may run ahead of its consumer.

    Raises:
        MediaError: Now for a bad header, later when the budget is spent.
    """
    check_header(source)
    with open_video(source, limits) as (container, stream):
        header = read_header(source, container, stream, limits)
        count = stream.frames or float(container.duration or 0) / 1e6 * float(header.rate)
    first = pyav_reader.first_frame(source, limits)
    turn = Orientation.of(first)
    half_tick = float(header.time_base) / 2 + 1e-9
    free = limits.untimed()

    def from_start(threads: str) -> Iterator[tuple[Frame, float]]:
        pairs = pyav_reader.read_all(source, free, header, turn, threads)
        return sample_stream(pairs, fps, half_tick)

    if fps is None or not suits(source, header) or not worth(count, first.width * first.height):
        return from_start("AUTO")
    size = turn.size(first.width, first.height)
    fast = sampled(source, free, header, turn, size, fps, half_tick, ahead)
    return _else_from_start(fast, from_start)


def _else_from_start(
    fast: Iterator[tuple[Frame, float]], slow: Callable[[str], Iterator[tuple[Frame, float]]]
) -> Iterator[tuple[Frame, float]]:
    """Yield `fast`, and where it gives up, the rest of `slow`, which gives the same frames."""
    given = 0
    try:
        for pair in fast:
            given += 1
            yield pair
    except Mismatch as reason:
        # Frame threads drop other frames each time on damage.
        threads = "SLICE" if isinstance(reason, Damage) else "AUTO"
        yield from islice(slow(threads), given, None)
