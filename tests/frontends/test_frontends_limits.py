"""Arguments, limits, arrays, lists and iterators that are refused."""

from __future__ import annotations

import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from media_factory import refused, write_video
from PIL import Image

from mmfast.frontends.image import read_image
from mmfast.frontends.source import Limits
from mmfast.frontends.video.reader import iter_video, read_video


def test_arguments(clip_path: Path) -> None:
    read = lambda **sampling: lambda: read_video(clip_path, **sampling)
    for frames in (0, -3, "x", 2.5, True, float("nan"), [8]):
        refused(read(frames=frames), f"frames={frames!r}", "positive whole number such as 8")
    for fps in (0, -3, "x", True, float("nan"), float("inf"), 10**400):
        refused(read(fps=fps), "fps=", "positive number such as 2")
        if fps is not True:
            refused(lambda fps=fps: iter_video(clip_path, fps=fps), "fps=", "positive number")
    for times in ([], "x", 1.0, [[1.0]], [float("nan")], ["a"], [None]):
        refused(read(times=times), "times=", "[0.5, 2.0]")
    for late in (-0.1, 1.7, 1e9):
        refused(read(times=[0.5, late]), f"time {late:g} s", "from 0 to 1.600 s")
    refused(read(), "exactly one of frames, fps and times", "got none")
    refused(read(frames=2, fps=1), "exactly one", "frames=2, fps=1")
    refused(read(frames=2, backend="ffmpeg"), "'ffmpeg'", "auto, decord, pyav")


def test_decord_says_what_it_cannot_read(tmp_path: Path, clip_path: Path) -> None:
    path = write_video(tmp_path / "ten.mp4", pix_fmt="yuv420p10le")
    for media, why in ((path, "yuv420p10le"), (clip_path.read_bytes(), "past the end")):
        call = lambda media=media: read_video(media, frames=2, backend="decord")
        refused(call, why, "use backend='auto'")


def test_limits_are_checked_before_decoding(
    clip_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmfast.frontends.video.decoders.PacketDecoder._decode", None)
    for limits, part in (
        (Limits(bytes=1000), "Limits(bytes=...)"),
        (Limits(pixels=6143), "96x64 = 6,144 pixels"),
        (Limits(frames=47), "Limits(frames=...)"),
        (Limits(duration=1.5), "lasts 1.6 s, the limit is 1.5 s"),
        (Limits(min_side=65), "96x64"),
    ):
        refused(lambda limits=limits: read_video(clip_path, frames=2, limits=limits), part)


def test_limits_are_spent_while_decoding(clip_path: Path) -> None:
    def endless():
        while True:
            yield np.zeros((64, 64, 3), np.uint8)

    tight = Limits(decoded_bytes=10 * 64 * 96 * 3)
    refused(lambda: read_video(clip_path, frames=11, limits=tight), "11 frames of 96x64")
    assert len(read_video(clip_path, frames=10, limits=tight)) == 10
    refused(lambda: read_video(endless(), frames=2, limits=tight), "decoded_bytes")
    refused(lambda: read_video(clip_path, frames=2, limits=Limits(seconds=-1)), "took over -1 s")


def test_a_stream_waits_for_its_consumer(clip_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = iter_video(clip_path, limits=Limits(frames=48, seconds=50))
    next(pairs)
    later = time.monotonic() + 3600
    monkeypatch.setattr("mmfast.frontends.source.time.monotonic", lambda: later)
    assert len(list(pairs)) == 47


def test_arrays_of_the_wrong_kind() -> None:
    good = np.zeros((4, 8, 8, 3))
    nan, infinite = good.copy(), good.copy()
    nan[3, 7, 7, 2], infinite[3, 7, 7, 2] = np.nan, np.inf
    cases = [
        (nan, "NaN or infinite"),
        (infinite, "NaN or infinite"),
        (good + 2, "values from 2 to 2: scale them to [0, 1]"),
        (good - 0.5, "values from -0.5 to -0.5"),
        (good.astype(np.int64), "dtype int64: give uint8"),
        (good.astype(object), "dtype object: give uint8"),
        (good.astype(bool), "dtype bool"),
        (good.astype(complex), "dtype complex128"),
        (np.zeros((8, 8), np.uint8), "[8, 8]"),
        (np.zeros((8, 8, 3), np.uint8), "[8, 8, 3]"),
        (np.zeros((4, 8, 8, 5), np.uint8), "[4, 8, 8, 5], in which no axis can be the channels"),
        (np.zeros((1, 4, 8, 8, 3), np.uint8), "[1, 4, 8, 8, 3]"),
        (np.zeros((0, 8, 8, 3), np.uint8), "holds no frame"),
        (np.zeros((4, 0, 8, 3), np.uint8), "holds no frame"),
    ]
    for array, part in cases:
        refused(lambda array=array: read_video(array, frames=1), part)
        refused(lambda array=array: list(iter_video(array)), part)
    for array, part in cases[:9]:
        frame = array[3] if array.ndim == 4 else array[None, None]
        refused(lambda frame=frame: read_image(frame), re.split(r"[:\[]", part)[0])
    meta = torch.empty(4, 3, 8, 8, device="meta")
    refused(lambda: read_video(meta, frames=1), "meta tensor", "give a dense")
    refused(lambda: read_video(torch.full((4, 3, 8, 8), torch.nan), frames=1), "NaN")
    refused(lambda: read_video(torch.zeros(4, 3, 8, 8, dtype=torch.long), frames=1), "int64")


def test_lists_and_iterators_of_the_wrong_kind(clip_path: Path) -> None:
    small, large = np.zeros((8, 8, 3), np.uint8), Image.new("RGB", (9, 8))
    refused(lambda: read_video([], frames=1), "list of frames is empty", "at least one")
    refused(lambda: read_video(iter([]), frames=1), "frame iterator is empty")
    for media in ([small, large], iter([small, large])):
        refused(lambda media=media: read_video(media, frames=1), "frame 1", "9x8", "8x8", "resize")
    refused(lambda: read_video([small, 7], frames=1), "frame 1", "of type int")
    refused(lambda: read_video([clip_path], frames=1), "clip.mp4", "is a video")
    refused(lambda: read_video([small, small], fps=1), "no times", "rate=")
    refused(lambda: read_video([small, small], fps=1, rate=0), "rate=0")
    refused(lambda: read_video([(small, 1.0), (small, 1.0)], frames=1), "ascending")
    refused(lambda: read_video([(small, 1.0), small], frames=1), "every frame needs a time")
    refused(lambda: read_video({"a": small}, frames=1), "dict", "give a path")
