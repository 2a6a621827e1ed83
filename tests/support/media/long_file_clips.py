"""Clips whose decoding goes wrong when a packet too many is left out, and how to read them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from media_factory import patched, turned, write_video

from mmfast.frontends.clip import Orientation
from mmfast.frontends.container import Header, open_video, read_header
from mmfast.frontends.sampling import sample_stream
from mmfast.frontends.source import Limits, MediaSource, open_source
from mmfast.frontends.video import decoders
from mmfast.frontends.video.threads import Ahead, sampled

SIZE = (96, 64)
LIMITS = Limits()
_TEXTURE = np.random.default_rng(7).integers(0, 255, (64, 160, 3), np.uint8)


def moving(number: int) -> np.ndarray:
    """A texture [64, 96, 3] that rolls on: every picture is predicted from its neighbours."""
    return np.roll(_TEXTURE, (number, 3 * number), axis=(0, 1))[:, :96]


X265 = "log-level=none:pools=1:frame-threads=1"
UNEVEN = [Fraction(n * n, 500) for n in range(60)]
# The bytes of libx264 depend on the instruction set; those of SSE2 equal plain C on every machine.
_SAME = "asm=sse2" if platform.machine() in ("x86_64", "AMD64") else ""
QUICK = {"preset": "veryfast", "threads": "1"} | ({"x264-params": _SAME} if _SAME else {})
_ALSO = f"{_SAME}:" if _SAME else ""
CLIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "GOP 1": ("mp4", {"gop": 1, "bframes": 0, "count": 40}),
    "GOP 12": ("mp4", {"gop": 12}),
    "GOP 12 without B-frames": ("mp4", {"gop": 12, "bframes": 0}),
    "GOP 250": ("mp4", {"gop": 250, "count": 300}),
    "B-pyramid": (
        "mkv",
        {"options": {**QUICK, "x264-params": f"{_ALSO}bframes=7:b-pyramid=normal"}},
    ),
    "open GOP": (
        "mp4",
        {"options": {**QUICK, "x264-params": f"{_ALSO}open-gop=1:keyint=12:bframes=3"}},
    ),
    "gradual refresh": (
        "mp4",
        {"bframes": 0, "options": {**QUICK, "x264-params": f"{_ALSO}intra-refresh=1:keyint=12"}},
    ),
    "uneven times": ("mp4", {"times": UNEVEN}),
    "hevc, open GOP": (
        "mp4",
        {"codec": "libx265", "options": {"x265-params": f"{X265}:keyint=15:bframes=3:open-gop=1"}},
    ),
    "hevc, closed GOP": (
        "mkv",
        {"codec": "libx265", "options": {"x265-params": f"{X265}:keyint=15:open-gop=0"}},
    ),
    "hevc, layers": (
        "mp4",
        {
            "codec": "libx265",
            "options": {"x265-params": f"{X265}:keyint=15:bframes=4:temporal-layers=2:open-gop=0"},
        },
    ),
    "vp9": ("webm", {"codec": "libvpx-vp9", "bframes": None, "options": {"cpu-used": "8"}}),
    "index in front": ("mp4", {"container": {"movflags": "faststart"}}),
    "fragments": ("mp4", {"container": {"movflags": "frag_keyframe+empty_moov"}}),
}


def write(folder: Path, name: str) -> Path:
    suffix, how = CLIPS[name]
    how = {"count": 60, "options": QUICK, "stored": moving, "size": SIZE, **how}
    path = folder / f"{name.replace(' ', '-').replace(',', '')}.{suffix}"
    return path if path.exists() else write_video(path, **how)


def rotated(path: Path) -> bytes:
    return turned(path.read_bytes(), 0, 1, -1, 0)


def cut_by_edit(path: Path, frames: int) -> bytes:
    """Let an edit list begin `frames` later: what is cut is decoded and not shown."""
    data = path.read_bytes()
    at = data.index(b"elst") + 12
    start = int.from_bytes(data[at + 4 : at + 8], "big")
    at = data.index(b"stts") + 16
    step = int.from_bytes(data[at : at + 4], "big")
    return patched(data, b"elst", 16, (start + frames * step).to_bytes(4, "big"))


class File:
    """A clip opened both ways: from its start by one decoder, and in slices."""

    def __init__(self, media: object) -> None:
        self.source: MediaSource = open_source(media, LIMITS)
        with open_video(self.source, LIMITS) as (container, stream):
            self.header: Header = read_header(self.source, container, stream, LIMITS)
        first: Any = decoders.first_frame(self.source, LIMITS)
        self.turn = Orientation.of(first)
        self.size = self.turn.size(first.width, first.height)
        self.tolerance = float(self.header.time_base) / 2 + 1e-9
        self.all = list(decoders.read_all(self.source, LIMITS, self.header, self.turn, "SLICE"))

    def sequential(self, fps: float) -> list[tuple[np.ndarray, float]]:
        return list(sample_stream(self.all, fps, self.tolerance))

    def sliced(self, fps: float, ahead: Ahead = Ahead()) -> Iterator[tuple[np.ndarray, float]]:  # noqa: B008
        return sampled(
            self.source, LIMITS, self.header, self.turn, self.size, fps, self.tolerance, ahead
        )


def same(got: Any, want: Any) -> bool:
    """Whether two readings give identical frames at identical times, in order."""
    got, want = list(got), list(want)
    assert all(a < b for (_, a), (_, b) in pairwise(got))
    assert [time for _, time in got] == [time for _, time in want]
    return all(np.array_equal(a, b) for (a, _), (b, _) in zip(got, want, strict=True))
