"""Damaged and random input: a clip or a one-line error, within seconds, never anything else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from media_factory import number_of, write_animation, write_video

from mmfast.core.errors import MediaError
from mmfast.frontends.clip import Clip
from mmfast.frontends.image import read_image
from mmfast.frontends.source import Limits
from mmfast.frontends.video.reader import iter_video, read_video

LIMITS = Limits(decoded_bytes=1 << 26, seconds=20)
# Derandomised: a decoder's crash cannot be caught, so the suite always runs the same examples.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* is an animation, of which", "ignore:.* has several pages"
)
hostile = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
HEADS = (
    b"\0\0\0\x20ftypisom",
    b"\0\0\0\x08moov",
    b"\x1aE\xdf\xa3",
    b"RIFF\xff\xff\0\0AVI ",
    b"RIFF\xff\0\0\0WEBPVP8 ",
    b"GIF89a\x40\0\x40\0",
    b"\x89PNG\r\n\x1a\n",
    b"\xff\xd8\xff\xe0",
    b"FLV\x01",
    b"OggS",
    b"G" + bytes(187) + b"G",
    b"YUV4MPEG2 W16 H16 F25:1 C420\nFRAME\n",
    b"BM",
    b"II*\0",
)
FORMATS = ("mp4", "front.mp4", "mkv", "avi", "ts", "gif", "webp", "png")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, made = tmp_path_factory.mktemp("samples"), {}
    for name in FORMATS:
        path = folder / f"x.{name}"
        if name in ("gif", "webp", "png"):
            write_animation(path, [40] * 5, (64, 48))
        else:
            front = {"movflags": "faststart"} if name.startswith("front") else {}
            write_video(path, count=24, container=front)
        made[name] = path.read_bytes()
    return made


def read_anyhow(media: object) -> Clip | None:
    """Read in every way; nothing but a MediaError of one line may come out."""
    start = time.monotonic()
    clip = None
    try:
        clip = read_video(media, frames=6, limits=LIMITS)
        assert clip.frames.shape == (len(clip), clip.height, clip.width, 3)
        assert len(clip.times) == len(clip.indices) == len(clip)
        assert all(0 <= i < clip.total_frames for i in clip.indices)
        assert list(clip.times) == sorted(clip.times)
    except MediaError as error:
        assert "\n" not in str(error)
    for other in (lambda: list(iter_video(media, fps=4, limits=LIMITS)), lambda: read_image(media)):
        try:
            other()
        except MediaError as error:
            assert "\n" not in str(error)
    assert time.monotonic() - start < 60
    return clip


@hostile
@given(st.sampled_from((b"", *HEADS)), st.binary(max_size=600))
def test_random_bytes(head: bytes, tail: bytes) -> None:
    read_anyhow(head + tail)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", FORMATS)
@hostile
@given(share=st.floats(0, 1, exclude_max=True))
def test_random_truncation(samples: dict[str, bytes], tmp_path: Path, name: str, share: float):
    data = samples[name]
    cut = data[: int(share * len(data))]
    path = tmp_path / "cut"
    path.write_bytes(cut)
    for media in (path, cut):
        clip = read_anyhow(media)
        if clip is not None:  # a transport stream has no length; what is there must be right
            assert name in ("ts", "gif", "png")


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("name", FORMATS)
@hostile
@given(
    changes=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=30
    )
)
def test_random_damage(samples: dict[str, bytes], tmp_path: Path, name: str, changes) -> None:
    data = bytearray(samples[name])
    for share, value in changes:
        data[int(share * len(data))] = value
    path = tmp_path / "damaged"
    path.write_bytes(data)
    for media in (path, bytes(data)):
        read_anyhow(media)


@pytest.mark.parametrize("backend", ["auto", "pyav"])
def test_a_hole_in_the_middle_costs_only_the_frames_it_hits(tmp_path: Path, backend: str) -> None:
    """One group of pictures is wiped; frames before and after keep number and time."""
    path = write_video(tmp_path / "hole.mp4", count=60, gop=12, bframes=0)
    data = bytearray(path.read_bytes())
    start, size = data.index(b"mdat"), data.index(b"moov") - data.index(b"mdat")
    hole = slice(start + size // 2, start + size // 2 + size // 12)
    data[hole] = bytes(hole.stop - hole.start)
    path.write_bytes(data)
    try:
        clip = read_video(path, frames=1000, backend=backend)
    except MediaError as error:
        assert "damaged" in str(error)
        return
    assert 40 <= len(clip) < 60
    right = [abs(n / 30 - t) < 1e-6 for n, t in zip(readable(clip), clip.times, strict=True)]
    assert sum(right) >= 40 and all(right[:20]) and all(right[-10:])


def readable(clip: Clip) -> list[int]:
    def number(frame) -> int:
        try:
            return number_of(frame)
        except AssertionError:  # a concealed picture
            return -1

    return [number(frame) for frame in clip.frames]
