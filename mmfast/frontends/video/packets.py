"""Packets of a video: entry points of decoding, the packets that wanted frames need, their reader.

The first bytes of a packet show whether decoding may begin with it and whether other pictures refer
to it (unit types: ITU-T H.264 table 7-1 and D.1.8, recovery point; H.265 table 7-1). Wanted frames
turn groups of packets into independent jobs, which `SliceReader` decodes and checks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt

from mmfast.frontends.container import Header, open_video
from mmfast.frontends.sampling import Indices
from mmfast.frontends.source import Budget, Damage, Limits, MediaSource, Mismatch, refusing

_RECOVERY_POINT = 6  # SEI payload type
_HEVC_PLAIN = frozenset((*range(10), *range(16, 22), 35, 36, 37, 38, 39, 40))
_HEVC_NOT_REFERRED = frozenset((0, 2, 4, 6, 8))
_AVC_ASIDE = frozenset((6, 9, 10, 11, 12))  # messages, delimiters, filler


class Facts(NamedTuple):
    """Facts about one packet."""

    entry: bool  # decoding may begin here and is correct from this picture's time on
    fresh: bool  # decoding may begin here and is correct for every later packet
    disposable: bool = False  # no other picture refers to it
    layer: int = 0  # temporal sub-layer; higher ones refer to pictures of lower ones
    sets: bool = False  # it holds sequence parameters, which may change the picture size
    strange: bool = False  # it changes the decoding of later packets, so none may be left out


Reader = Callable[[Any], Facts]


def unit_reader(header: Header) -> Reader | None:
    """Return a function that reads facts of a packet; None where the codec's are unreadable."""
    extra = header.extradata
    if header.codec == "h264":
        known = extra[:1] == b"\1" and len(extra) > 4
        return _avc(extra, (extra[4] & 3) + 1) if known else None
    if header.codec == "hevc":
        known = extra[:1] == b"\1" and len(extra) > 21
        return _hevc(extra, (extra[21] & 3) + 1) if known else None
    return lambda packet: Facts(packet.is_keyframe, packet.is_keyframe)


def _units(packet: Any, width: int) -> Iterator[memoryview]:
    """Yield the length-prefixed NAL units of a packet."""
    data, position = memoryview(packet), 0
    while position + width < len(data):
        length = int.from_bytes(data[position : position + width], "big")
        position += width
        yield data[position : position + length]
        position += length


def _avc(extra: bytes, width: int) -> Reader:
    def read(packet: Any) -> Facts:
        slices, referred, recovers = set(), False, False
        sets = strange = False
        for unit in _units(packet, width):
            if not len(unit):
                continue
            kind = unit[0] & 31
            if 1 <= kind <= 5:
                slices.add(kind)
                referred = referred or bool(unit[0] & 0x60)
            elif kind == 6:
                recovers = recovers or (packet.is_keyframe and _recovery(bytes(unit)))
            elif kind not in _AVC_ASIDE:
                sets = sets or kind in (7, 15)
                strange = strange or bytes(unit) not in extra  # a repeated one changes nothing
        fresh = slices == {5}
        return Facts(
            entry=fresh or (recovers and slices == {1}),
            fresh=fresh,
            disposable=slices == {1} and not referred,
            sets=sets,
            strange=strange,
        )

    return read


def _recovery(unit: bytes) -> bool:
    """Return True if an SEI unit promises exact pictures from this one's time on."""
    data, at = unit.replace(b"\0\0\3", b"\0\0"), 1
    while at + 2 < len(data):
        kind = size = 0
        for value in (0, 1):
            total = 0
            while at < len(data) and data[at] == 255:
                total, at = total + 255, at + 1
            total, at = total + (data[at] if at < len(data) else 0), at + 1
            kind, size = (total, size) if value == 0 else (kind, total)
        if kind == _RECOVERY_POINT and at < len(data):
            return data[at] & 0xC0 == 0xC0  # no frame to wait for (ue 0), exact match (1)
        at += size
    return False


def _hevc(extra: bytes, width: int) -> Reader:
    def read(packet: Any) -> Facts:
        slices, layer = set(), 0
        sets = strange = False
        for unit in _units(packet, width):
            if len(unit) < 2:
                continue
            kind = unit[0] >> 1 & 63
            if kind < 32:
                slices.add(kind)
                layer = max(layer, (unit[1] & 7) - 1)
            if kind not in _HEVC_PLAIN or unit[0] & 1 or unit[1] >> 3:  # or of another layer
                sets = sets or kind == 33
                strange = strange or bytes(unit) not in extra
        fresh = bool(slices) and slices <= {19, 20}
        return Facts(
            entry=packet.is_keyframe and (fresh or slices == {21}),  # 21: clean random access
            fresh=fresh,
            disposable=bool(slices) and slices <= _HEVC_NOT_REFERRED,
            layer=layer,
            sets=sets,
            strange=strange,
        )

    return read


_MOST_GROUPS = 20_000
_LONGEST = 3000  # most packets before the second entry; other streams are read from the start

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class PacketGroup:
    """The packets from one entry point to the next, in decoding order."""

    first: int  # number of the first packet in the stream
    pts: Indices  # presentation ticks, [n]; the first is the entry's
    shown: Flags  # packets whose frame is presented, [n]; an edit list hides others
    spare: Flags  # packets that no other one refers to, [n]
    fresh: bool  # no reference to earlier packets; else an open group of pictures

    @property
    def ticks(self) -> Indices:
        """Ticks of its shown frames, ascending."""
        return np.sort(self.pts[self.shown])


@dataclass(frozen=True, eq=False)
class SliceJob:
    """Packets to read from an entry point on, with those to decode and the frames to keep."""

    first: int
    pts: Indices  # [n] of every packet up to the last one needed, to check the stream
    send: Flags  # [n]
    wanted: tuple[int, ...]  # ticks of frames, ascending

    @property
    def cost(self) -> int:
        """Number of packets to decode."""
        return int(self.send.sum())


def all_groups(packets: Sequence[tuple[int | None, bool, Facts]]) -> tuple[PacketGroup, ...] | None:
    """Return the groups of a whole stream; None where it cannot be cut, or into too many."""
    try:
        found = tuple(islice(groups(packets), _MOST_GROUPS + 1))
    except Mismatch:
        return None
    return found if len(found) <= _MOST_GROUPS else None


def groups(packets: Iterable[tuple[int | None, bool, Facts]]) -> Iterator[PacketGroup]:
    """Cut a stream of (ticks, shown, facts) at its entry points.

    Where it has to be decoded from its start: `Mismatch` if entries are missing; `Damage` if units
    are strange, the first entry is missing or groups overlap, since destroyed packets look so, too.
    """
    held: list[tuple[int, bool, Facts]] = []
    first = 0
    latest = None
    for number, (pts, shown, facts) in enumerate(packets):
        if facts.strange or pts is None or not (number or facts.fresh):
            raise Damage
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


def _group(first: int, held: Sequence[tuple[int, bool, Facts]]) -> PacketGroup:
    flat = not any(facts.layer for _, _, facts in held)
    return PacketGroup(
        first=first,
        pts=np.array([pts for pts, _, _ in held], dtype=np.int64),
        shown=np.array([shown for _, shown, _ in held], dtype=bool),
        spare=np.array([facts.disposable and flat for _, _, facts in held], dtype=bool),
        fresh=held[0][2].fresh,
    )


def _after(group: PacketGroup, latest: int | None) -> int | None:
    """Check that a group's frames have rising times after the group before; return its latest."""
    ticks = group.ticks
    if not len(ticks):
        return latest
    if (np.diff(ticks) <= 0).any() or (latest is not None and ticks[0] <= latest):
        raise Damage
    return int(ticks[-1])


def with_wanted(
    wanted: Iterable[int], seen: deque[PacketGroup]
) -> Iterator[tuple[PacketGroup, list[int]]]:
    """Give each of the groups `seen`, which are consumed, the wanted ticks (ascending) in it."""
    mine: list[int] = []
    for tick in wanted:
        while tick > seen[0].pts[seen[0].shown].max(initial=-(1 << 62)):
            yield seen.popleft(), mine
            mine = []
        mine.append(tick)
    while seen:
        yield seen.popleft(), mine
        mine = []


def jobs(planned: Iterable[tuple[PacketGroup, list[int]]]) -> Iterator[SliceJob]:
    """Turn groups with wanted ticks into jobs; an open group joins the job of the one before it."""
    before: tuple[PacketGroup, list[int]] | None = None
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
    group: PacketGroup, wanted: list[int], following: PacketGroup | None, more: list[int]
) -> Iterator[SliceJob]:
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
    yield SliceJob(group.first, pts[:end], (send & (hit | ~spare))[:end], ticks)


def slices(
    found: Iterable[SliceJob], packets: int, frames: int
) -> Generator[list[SliceJob], None, None]:
    """Join jobs to slices of at least `packets` to decode or about `frames` to keep."""
    held: list[SliceJob] = []
    cost = kept = 0
    for job in found:
        if held and (cost >= packets or kept + len(job.wanted) > frames):
            yield held
            held, cost, kept = [], 0, 0
        held.append(job)
        cost, kept = cost + job.cost, kept + len(job.wanted)
    if held:
        yield held


_NEAR = 64  # packets skipped by reading and not by seeking


class SliceReader:
    """One open decoder that runs jobs one after the other."""

    def __init__(self, container: Any, stream: Any, budget: Budget) -> None:
        self._container, self._stream, self._budget = container, stream, budget
        self._context = stream.codec_context
        self._packets: Iterator[Any] = container.demux(stream)
        self._at = 0  # number of the packet that comes next

    def frames(self, job: SliceJob, go_on: Callable[[], bool]) -> Iterator[tuple[Any, int]]:
        """Yield the wanted frames with their ticks while `go_on`; `Damage` if they differ.

        A frame waits for those that are decoded before it and shown after it, since it may refer
        to them, and a decoder tells of damage when it shows a picture.
        """
        left, held = iter(job.wanted), deque[tuple[Any, int]]()
        due, shown = next(left), -(1 << 62)
        latest = np.maximum.accumulate(np.where(job.send, job.pts, -(1 << 62)))
        until = dict(zip(job.pts.tolist(), latest.tolist(), strict=True))
        for frame in self._decoded(job, go_on):
            if frame.pts is None or frame.is_corrupt or not shown < frame.pts <= due:
                raise Damage
            shown = frame.pts
            if frame.pts == due:
                held.append((frame, due))
                due = next(left, 1 << 62)
            while held and until[held[0][1]] <= frame.pts:
                yield held.popleft()
        if due != 1 << 62 and go_on():
            raise Damage
        yield from held

    def _decoded(self, job: SliceJob, go_on: Callable[[], bool]) -> Iterator[Any]:
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

    def _reach(self, job: SliceJob) -> Any:
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
def slice_reader(source: MediaSource, limits: Limits, threads: str) -> Iterator[SliceReader]:
    """Open a file for reading slices; `threads` NONE keeps the decoder in the calling thread."""
    with open_video(source, limits, threads if threads != "NONE" else "SLICE") as (file, stream):
        if threads == "NONE":
            stream.codec_context.thread_count = 1
        # Errors must not be concealed: decoding from the start conceals them in another way.
        stream.codec_context.options = {"max_pixels": str(limits.pixels), "err_detect": "explode"}
        with refusing(source.name):
            reader = SliceReader(file, stream, Budget(limits, source.name))
        yield reader
