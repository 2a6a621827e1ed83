"""Which packets must be decoded for the frames that are wanted, in pieces that stand alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from mmfast.frontends.guard import Mismatch
from mmfast.frontends.long_file_units import Facts
from mmfast.frontends.sampling import Indices

_MOST_GROUPS = 20_000
_LONGEST = 3000  # packets before the second entry; a stream that has none is read from its start

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Group:
    """The packets from one entry point to the next, in decoding order.

    Attributes:
        first: Number of the first packet in the stream.
        pts: Presentation ticks, [n]; the first is the entry's.
        shown: Packets whose frame is presented, [n]; an edit list hides others.
        spare: Packets that no other one refers to, [n].
        fresh: Nothing in it refers to anything before it. Else the pictures shown before its
            first one do (an open group of pictures).
    """

    first: int
    pts: Indices
    shown: Flags
    spare: Flags
    fresh: bool

    @property
    def ticks(self) -> Indices:
        """Ticks of the frames it shows, ascending."""
        return np.sort(self.pts[self.shown])


@dataclass(frozen=True, eq=False)
class Job:
    """Packets to read from an entry point on, which of them to decode, and what to keep."""

    first: int
    pts: Indices  # [n] of every packet up to the last one needed, to check what is read
    send: Flags  # [n]
    wanted: tuple[int, ...]  # ticks of frames, ascending

    @property
    def cost(self) -> int:
        """Packets to decode."""
        return int(self.send.sum())


def all_groups(packets: Sequence[tuple[int | None, bool, Facts]]) -> tuple[Group, ...] | None:
    """The groups of a whole stream; None where it cannot be cut, or into too many to hold."""
    try:
        found = tuple(islice(groups(packets), _MOST_GROUPS + 1))
    except Mismatch:
        return None
    return found if len(found) <= _MOST_GROUPS else None


def groups(packets: Iterable[tuple[int | None, bool, Facts]]) -> Iterator[Group]:
    """Cut a stream of (ticks, shown, facts) at its entry points.

    Raises:
        Mismatch: The stream does not begin with an entry, has no other one for long, changes its
            parameters, or its groups are not presented one behind the other: it has to be
            decoded from its start.
    """
    held: list[tuple[int, bool, Facts]] = []
    first = 0
    latest = None
    for number, (pts, shown, facts) in enumerate(packets):
        if facts.strange or pts is None or not (number or facts.fresh):
            raise Mismatch
        if facts.entry and held:
            group = _group(first, held)
            latest = _after(group, latest)
            yield group
            first, held = number, []
        held.append((pts, shown, facts))
        if not first and len(held) > _LONGEST:
            raise Mismatch
    if held:
        group = _group(first, held)
        _after(group, latest)
        yield group


def _group(first: int, held: Sequence[tuple[int, bool, Facts]]) -> Group:
    flat = not any(facts.layer for _, _, facts in held)
    return Group(
        first=first,
        pts=np.array([pts for pts, _, _ in held], dtype=np.int64),
        shown=np.array([shown for _, shown, _ in held], dtype=bool),
        spare=np.array([facts.disposable and flat for _, _, facts in held], dtype=bool),
        fresh=held[0][2].fresh,
    )


def _after(group: Group, latest: int | None) -> int | None:
    """Check that a group's frames have rising times behind the one before; give its latest."""
    ticks = group.ticks
    if not len(ticks):
        return latest
    if (np.diff(ticks) <= 0).any() or (latest is not None and ticks[0] <= latest):
        raise Mismatch
    return int(ticks[-1])


def with_wanted(wanted: Iterable[int], seen: deque[Group]) -> Iterator[tuple[Group, list[int]]]:
    """Give each group the wanted ticks among its frames.

    Args:
        wanted: Ticks, ascending.
        seen: The groups up to the one that holds the tick drawn last, or more; they are used up.
    """
    mine: list[int] = []
    for tick in wanted:
        while tick > seen[0].pts[seen[0].shown].max(initial=-(1 << 62)):
            yield seen.popleft(), mine
            mine = []
        mine.append(tick)
    while seen:
        yield seen.popleft(), mine
        mine = []


def jobs(planned: Iterable[tuple[Group, list[int]]]) -> Iterator[Job]:
    """Turn groups with their wanted ticks into jobs; groups without any are skipped.

    In an open group the pictures before its entry need the group before: they join its job.
    """
    before: tuple[Group, list[int]] | None = None
    for group, wanted in planned:
        entry = int(group.pts[0])
        leading = [] if group.fresh else [tick for tick in wanted if tick < entry]
        if before is None and leading:
            raise Mismatch
        if before is not None:
            yield from _job(*before, group, leading)
        before = group, wanted[len(leading) :]
    if before is not None:
        yield from _job(*before, None, [])


def _job(
    group: Group, wanted: list[int], following: Group | None, more: list[int]
) -> Iterator[Job]:
    if not wanted and not more:
        return
    pts, spare = group.pts, group.spare
    send = np.ones(len(pts), dtype=bool)
    if not group.fresh:  # undecodable from here, and nothing that is shown later needs them
        send = pts >= pts[0]
    if following is not None and more:
        pts = np.concatenate([pts, following.pts])
        spare = np.concatenate([spare, following.spare])
        send = np.concatenate([send, np.ones(len(following.pts), dtype=bool)])
    ticks = (*wanted, *more)
    hit = np.isin(pts, np.array(ticks, dtype=np.int64))
    end = int(np.flatnonzero(hit)[-1]) + 1
    yield Job(group.first, pts[:end], (send & (hit | ~spare))[:end], ticks)


def slices(found: Iterable[Job], packets: int, frames: int) -> Generator[list[Job], None, None]:
    """Join jobs until they are worth a thread's while: `packets` to decode or `frames` to keep."""
    held: list[Job] = []
    cost = kept = 0
    for job in found:
        if held and (cost >= packets or kept + len(job.wanted) > frames):
            yield held
            held, cost, kept = [], 0, 0
        held.append(job)
        cost, kept = cost + job.cost, kept + len(job.wanted)
    if held:
        yield held
