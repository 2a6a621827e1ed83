"""The parallel reader as the front-end uses it: a stream of sampled frames, or an array to fill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import av
import numpy as np

from mmfast.frontends.container import Header, open_video
from mmfast.frontends.guard import Damage, Mismatch
from mmfast.frontends.limits import Limits
from mmfast.frontends.long_file import SLICE, Crew, crew, crew_size, worth
from mmfast.frontends.long_file_plan import Group, groups, jobs, slices, with_wanted
from mmfast.frontends.long_file_queue import Ahead
from mmfast.frontends.long_file_units import Facts, unit_reader
from mmfast.frontends.picture import Frame, Frames, Orientation, to_rgb
from mmfast.frontends.sampling import Indices, sample_stream
from mmfast.frontends.source import Source

_KEPT = 16  # frames of a slice of short groups
_UNBOUND = Ahead(frames=1 << 60, bytes=1 << 60)


def scan(
    source: Source, limits: Limits, header: Header
) -> Iterator[tuple[int | None, bool, Facts]]:
    """List the packets of a file as they are asked for: ticks, whether shown, facts.

    Raises:
        Mismatch: There are too many, or they say nothing.
        Damage: A packet is damaged, or cannot be read.
    """
    look = unit_reader(header)
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
    source: Source,
    limits: Limits,
    header: Header,
    turn: Orientation,
    size: tuple[int, int],
    fps: float,
    tolerance: float,
    ahead: Ahead,
) -> Iterator[tuple[Frame, float]]:
    """Yield the frames that `sample_stream` takes of a file, decoded in parallel.

    The packets are listed no further ahead than the threads need, so that the first frame of a
    film comes as soon as that of a clip.

    Raises:
        Mismatch: Behind the frames before it, the stream needs decoding from its start.
        MediaError: ... it is broken, or the limits are spent.
    """
    seen: deque[Group] = deque()

    def ticks() -> Iterator[tuple[int, float]]:
        for group in groups(scan(source, limits, header)):
            seen.append(group)
            shown = group.ticks
            yield from zip(shown.tolist(), header.seconds(shown).tolist(), strict=True)

    def convert(frame: Any, tick: int) -> tuple[tuple[Frame, float], int]:
        rgb = np.empty((size[1], size[0], 3), np.uint8)
        to_rgb(frame, rgb, turn, source.name)
        return (rgb, float(header.seconds(tick))), rgb.nbytes

    wanted = (tick for tick, _ in sample_stream(ticks(), fps, tolerance))
    parts = slices(jobs(with_wanted(wanted, seen)), SLICE, _KEPT)
    yield from crew(source, limits, parts, convert, ahead, size[0] * size[1]).items()


def fill(
    source: Source,
    limits: Limits,
    found: tuple[Group, ...],
    ticks: Indices,
    turn: Orientation,
    out: Frames,
) -> bool:
    """Fill `out` [m, H, W, 3] with the frames at `ticks` [m] (ascending), in parallel.

    Returns:
        False where it would not pay and nothing was done.

    Raises:
        Mismatch: The stream needs decoding from its start.
        MediaError: It is broken, or the limits are spent.
    """
    pixels = out.shape[1] * out.shape[2]
    workers = crew_size(pixels)
    parts = list(slices(jobs(with_wanted(iter(ticks.tolist()), deque(found))), SLICE, 1 << 60))
    cost = sum(job.cost for part in parts for job in part)
    if min(workers, len(parts)) < 2 or not worth(cost, pixels):
        return False
    place = {tick: row for row, tick in enumerate(ticks.tolist())}

    def convert(frame: Any, tick: int) -> tuple[None, int]:
        to_rgb(frame, out[place[tick]], turn, source.name)
        return None, 0

    for _ in Crew(source, limits, iter(parts), convert, workers, _UNBOUND).items():
        pass
    return True
