"""Index of the frames of a video from its packets alone, without decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from mmfast.core.errors import MediaError
from mmfast.frontends.container import Header
from mmfast.frontends.sampling import Indices
from mmfast.frontends.source import Budget, Limits, MediaSource, refusing
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
