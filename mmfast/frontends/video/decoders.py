"""Frames of a video file by number, with PyAV or with decord; both give the same pictures.

An `Index` numbers the frames by the packets alone. PyAV seeks exactly where the packets allow it
and counts frames where they do not. Decord is faster but built on an old FFmpeg, so it reads only
kinds of files that it reads correctly. Measured on decord 0.6.0 against PyAV: H.264 and HEVC, 8-bit
4:2:0, progressive, in mp4 and Matroska are bit-identical if every key frame is a fresh start; after
others it returns wrong frames. 10-bit, interlaced and odd-sized pictures differ, transport streams
lose frames, AV1 is unknown, mirrored pictures are not mirrored, damaged headers crash the process,
and bytes are read past their end.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Frame, Frames, Orientation, write_rgb
from mmfast.frontends.container import Header, open_video
from mmfast.frontends.sampling import Indices, no_times, rising
from mmfast.frontends.source import Budget, Limits, MediaSource, Mismatch, first_line, refusing
from mmfast.frontends.video.packets import Facts, PacketGroup, all_groups, unit_reader
from mmfast.frontends.video.threads import suits

# Where one packet is one frame. Elsewhere a packet may hold no frame (VP8 alternate references,
# MPEG-4 "not coded" frames) or half of one (interlaced fields); those are counted by decoding.
_ONE_PACKET_ONE_FRAME = frozenset(
    ("h264", "hevc", "av1", "libdav1d", "vp9", "prores", "mjpeg", "ffv1", "rawvideo")
)
_SEEKABLE_KINDS = frozenset(("mp4", "mkv", "avi", "y4m"))


class Packet(NamedTuple):
    """One packet of the video stream, times in ticks."""

    pts: int | None
    dts: int | None
    key: bool
    discard: bool  # decoded for other frames, hidden by an edit list
    corrupt: bool
    duration: int


@dataclass(frozen=True)
class Index:
    """The frames of a video in presentation order."""

    ticks: Indices  # [n] presentation time of each frame in units of the time base
    end: int  # the tick at which the last frame ends
    keys: Indices  # [k] presentation ticks of the key frames, ascending
    trusted: bool  # every packet is one frame with its own time, so that seeking is exact
    plain: bool  # decord may read it: fresh starts only, no hidden frame, fixed parameters
    mended: int = 0  # frames whose time did not rise
    groups: tuple[PacketGroup, ...] | None = None  # by entry points; None: only the start is one


def packet_index(
    source: MediaSource, container: Any, stream: Any, header: Header, limits: Limits
) -> Index:
    """List the frames by reading every packet; an error if there are none or too many."""
    look = unit_reader(header)
    packets: list[Packet] = []
    facts: list[Facts] = []
    budget = Budget(limits, source.name)
    with refusing(source.name, "read"):
        for p in container.demux(stream):
            if p.size:
                packets.append(
                    Packet(p.pts, p.dts, p.is_keyframe, p.is_discard, p.is_corrupt, p.duration or 0)
                )
                if look is not None:
                    facts.append(look(p))
                limits.check_frames(source.name, len(packets))
                budget.clock()
    shown = [p for p in packets if not p.discard]
    if not shown:
        raise MediaError(
            f"{source.name} holds no frame: its video stream is empty, record it again"
        )
    plain = len(facts) == len(shown) == len(packets) and not _leading(packets)
    # decord takes any key frame for a fresh start and continues its numbers from it, so one that is
    # not (open groups of pictures, gradual refresh) makes it return wrong frames. And sequence
    # parameters inside the stream can change the picture size after all checks, which only PyAV can
    # refuse.
    for p, f in zip(packets, facts, strict=False):
        plain = plain and not f.sets and (f.fresh or not p.key)
    index = _build(source, header, packets, shown, plain)
    listed = [(p.pts, not p.discard, f) for p, f in zip(packets, facts, strict=False)]
    fits = index.trusted and suits(source, header) and len(facts) == len(packets)
    return replace(index, groups=all_groups(listed) if fits else None)


def _build(
    source: MediaSource, header: Header, packets: list[Packet], shown: list[Packet], plain: bool
) -> Index:
    # AVI stores no presentation times: its frames are shown at the decoding times in turn.
    avi = source.kind == "avi"
    ticks = np.array(sorted(t for p in shown if (t := p.dts if avi else p.pts) is not None))
    in_turn = all(a < b for a, b in pairwise([p.pts for p in shown if p.pts is not None]))
    keys = sorted(p.pts for p in packets if p.key and p.pts is not None)
    trusted = (
        header.codec in _ONE_PACKET_ONE_FRAME
        and header.progressive
        and (in_turn or header.reorders)
        and source.kind in _SEEKABLE_KINDS
        and not any(p.corrupt or p.pts is None for p in packets)
        and (not avi or all(p.pts == p.dts for p in packets))
        and len(ticks) == len(shown)
        and bool((np.diff(ticks) > 0).all())
        and bool(keys)
        and keys[0] <= int(ticks[0])
    )
    return Index(
        ticks=ticks.astype(np.int64),
        end=_end(header, shown, ticks),
        keys=np.array(keys, dtype=np.int64),
        trusted=trusted,
        plain=plain,
    )


def _end(header: Header, shown: list[Packet], ticks: Indices) -> int:
    """End of the last frame by its own duration, else the median distance, else the rate."""
    if not len(ticks):
        return 0
    last = max(shown, key=lambda p: p.pts if p.pts is not None else -(1 << 62))
    stay = last.duration
    if stay <= 0 and len(ticks) > 1:
        stay = int(np.median(np.diff(ticks)))
    if stay <= 0 and header.rate:
        stay = round(1 / (header.rate * header.time_base))
    if stay <= 0:
        stay = round(1 / header.time_base)  # a single frame without a rate lasts a second
    return int(ticks[-1]) + max(stay, 1)


def _leading(packets: list[Packet]) -> bool:
    """Return True if a frame is decoded after a key frame but shown before it."""
    newest = None
    for p in packets:
        if p.key:
            newest = p.pts
        elif newest is not None and p.pts is not None and p.pts < newest:
            return True
    return False


logger = logging.getLogger("mmfast")

_WORTH_SEEKING = 8  # frames; a seek empties the decoder's pipeline, which costs several


@dataclass
class PacketDecoder:
    """Decoder of one open stream, frame by frame, which skips damaged packets."""

    container: Any
    stream: Any
    budget: Budget
    faults: list[str] = field(default_factory=list)
    packets: int = 0

    def __iter__(self) -> Iterator[Any]:
        try:
            for packet in self.container.demux(self.stream):
                self.budget.clock()
                self.packets += 1
                for frame in self._decode(packet):
                    self.budget.frame(frame.width, frame.height)
                    yield frame
        except av.FFmpegError as error:
            self.faults.append(first_line(error))

    def _decode(self, packet: Any) -> list[Any]:
        try:
            return list(packet.decode())
        except av.FFmpegError as error:
            self.faults.append(first_line(error))
            return []


def first_frame(source: MediaSource, limits: Limits) -> Any:
    """Decode the first frame, which proves that there is one and has the orientation."""
    with open_video(source, limits, "SLICE") as (container, stream), refusing(source.name):
        decoder = PacketDecoder(container, stream, Budget(limits, source.name))
        for frame in decoder:
            return frame
    raise no_frames(source, decoder.faults)


def no_frames(source: MediaSource, faults: list[str]) -> MediaError:
    """Return the error of a stream of which nothing could be decoded."""
    why = f" ({faults[0]})" if faults else ""
    return MediaError(
        f"no frame of {source.name} can be decoded{why}: it is damaged, copy it again"
    )


def read_exact(
    source: MediaSource, limits: Limits, index: Index, turn: Orientation, rows: Indices, out: Frames
) -> None:
    """Fill `out` [m, H, W, 3] with frames number `rows` [m] (ascending), seeking between them."""
    with open_video(source, limits) as (container, stream), refusing(source.name):
        decoder = PacketDecoder(container, stream, Budget(limits, source.name))
        frames, reached = iter(decoder), -1
        for place, (row, tick) in enumerate(zip(rows.tolist(), index.ticks[rows], strict=True)):
            group = int(np.searchsorted(index.keys, tick, side="right")) - 1
            start = int(np.searchsorted(index.ticks, index.keys[group]))
            if start - reached > _WORTH_SEEKING:
                container.seek(int(index.keys[group]), stream=stream)
                frames = iter(decoder)
            write_rgb(_advance(frames, int(tick), decoder), out[place], turn, source.name)
            reached = row


def _advance(frames: Iterator[Any], tick: int, decoder: PacketDecoder) -> Any:
    for frame in frames:
        if decoder.faults or frame.pts is None or frame.pts > tick:
            break
        if frame.pts == tick:
            return frame
    raise Mismatch


def count_frames(
    source: MediaSource, limits: Limits, header: Header, index: Index
) -> tuple[Index, str]:
    """Index the frames by decoding them all, without keeping them.

    Also returns the threading with which decoding again gives the same frames.
    """
    decoder, ticks, threads = None, [], "AUTO"
    for threads in ("AUTO", "SLICE"):  # frame threads drop other frames each time on damage
        with open_video(source, limits, threads) as (container, stream), refusing(source.name):
            decoder = PacketDecoder(container, stream, Budget(limits, source.name))
            ticks = [frame.pts for frame in decoder]
        if not decoder.faults:
            break
    if decoder is None or not ticks:
        raise no_frames(source, decoder.faults if decoder else [])
    faults = len(decoder.faults)
    if 2 * faults > decoder.packets:
        raise MediaError(
            f"{source.name} is damaged: {faults} of {decoder.packets} packets cannot be decoded "
            f"({decoder.faults[0]}); copy or download it again"
        )
    if faults:
        logger.warning("%s: %d damaged packets, %d frames left", source.name, faults, len(ticks))
    return _timed(source, index, ticks), threads


def _timed(source: MediaSource, index: Index, ticks: list[int | None]) -> Index:
    """Give the index the times of the decoded frames, or those of the packets where they lack."""
    listed = index.ticks.tolist()
    if len(listed) == len(ticks) and (source.kind == "avi" or None in ticks):
        ticks = listed
    events: Counter[str] = Counter()
    found = [tick for _, tick in rising(((0, tick) for tick in ticks), source.name, events)]
    if None in found:
        raise no_times(source.name)
    moved = found[-1] > max(listed, default=found[-1])  # behind the last time that is known
    stay = found[-1] - found[-2] if moved else 1
    end = max(index.end, math.ceil(found[-1] + stay))
    return replace(index, ticks=np.array(found), end=end, trusted=False, mended=events["mended"])


def read_counted(
    source: MediaSource, limits: Limits, rows: Indices, turn: Orientation, out: Frames, threads: str
) -> None:
    """Fill `out` [m, H, W, 3] with frames number `rows` [m] (ascending), from the start."""
    wanted, row = rows.tolist(), 0
    with open_video(source, limits, threads) as (container, stream), refusing(source.name):
        decoder = PacketDecoder(container, stream, Budget(limits, source.name))
        for number, frame in enumerate(decoder):
            if number == wanted[row]:
                write_rgb(frame, out[row], turn, source.name)
                row += 1
                if row == len(wanted):
                    return
    raise MediaError(f"frame {wanted[row]} of {source.name} cannot be decoded: copy the file again")


def read_all(
    source: MediaSource,
    limits: Limits,
    header: Header,
    turn: Orientation,
    threads: str = "AUTO",
    events: Counter[str] | None = None,
) -> Iterator[tuple[Frame, float]]:
    """Yield every frame [H, W, 3] with its time, decoded lazily; `events` as in `rising`."""

    def ticked(frames: Iterable[Any]) -> Iterator[tuple[tuple[int, Frame], int | None]]:
        size: tuple[int, int] | None = None
        for number, frame in enumerate(frames):
            size = size or turn.size(frame.width, frame.height)
            rgb = np.empty((size[1], size[0], 3), np.uint8)
            with refusing(source.name):
                write_rgb(frame, rgb, turn, source.name)
            yield (number, rgb), None if source.kind == "avi" else frame.pts

    events = Counter() if events is None else events
    with open_video(source, limits, threads) as (container, stream):
        decoder = PacketDecoder(container, stream, Budget(limits, source.name))
        restart = math.inf if stream.time_base is None else 1 / float(stream.time_base)  # a second
        for (number, rgb), tick in rising(ticked(decoder), source.name, events, restart):
            yield rgb, _time(source, header, number, tick)


def _time(source: MediaSource, header: Header, number: int, tick: float | None) -> float:
    if tick is not None:
        return float(header.seconds(tick))
    if not header.rate:
        raise MediaError(f"frame {number} of {source.name} has no time: re-encode it with a rate")
    return float(number / header.rate)


_CHUNK = 64 << 20  # bytes of RGB fetched at once: decord holds its batch beside our copy


def decord_obstacle(
    source: MediaSource, header: Header, index: Index, interlaced: bool, turn: Orientation
) -> str:
    """Return the reason that keeps decord from reading this input; empty where there is none."""
    checks = (
        (importlib.util.find_spec("decord") is not None, "decord is not installed"),
        (isinstance(source.data, Path), "bytes: decord reads past the end of a damaged buffer"),
        (source.kind in ("mp4", "mkv"), f"{source.kind} files lose frames or times in decord"),
        (header.codec in ("h264", "hevc"), f"codec {header.codec}"),
        (header.pix_fmt in ("yuv420p", "yuvj420p"), f"pixel format {header.pix_fmt}"),
        (header.progressive and not interlaced, "interlaced pictures"),
        (not turn.mirrored, "mirrored pictures"),
        (header.alone, "several video streams"),
        (
            index.trusted and index.plain,
            "edits, damage, repeated times, open groups of pictures or parameters in the stream",
        ),
    )
    return next((reason for fine, reason in checks if not fine), "")


def read_decord(
    source: MediaSource, header: Header, index: Index, rows: Indices, out: Frames
) -> None:
    """Fill `out` [m, H, W, 3] with frames number `rows` [m] (ascending), or raise `Mismatch`."""
    try:
        decord: Any = importlib.import_module("decord")
        decord.logging.set_level(decord.logging.QUIET)
        # One recovered (repeated) frame anywhere is an error.
        reader = decord.VideoReader(str(source.data), fault_tol=1e-9)
        _compare_times(reader, header, index)
        step = max(1, _CHUNK // max(1, out[0].nbytes))
        for start in range(0, len(rows), step):
            part = reader.get_batch(rows[start : start + step].tolist())
            out[start : start + step] = part.asnumpy() if hasattr(part, "asnumpy") else part
    except Mismatch:
        raise
    except Exception as error:  # decord's own errors, and a wrong shape in the copy
        raise Mismatch from error


def _compare_times(reader: Any, header: Header, index: Index) -> None:
    """Check that decord numbers the frames alike; its times are float32 and start at 0."""
    count = len(index.ticks)
    if len(reader) != count:
        raise Mismatch
    theirs = reader.get_frame_timestamp(np.arange(count))[:, 0]
    ours = header.seconds(index.ticks)
    if not np.allclose(theirs - theirs[0], ours - ours[0], atol=1e-3, rtol=1e-6):
        raise Mismatch
