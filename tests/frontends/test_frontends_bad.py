"""Bad media: one line that names the value and the fix, and nothing else."""

from __future__ import annotations

import io
import os
import wave
from pathlib import Path

import numpy as np
import pytest
from media_factory import (
    jpeg_of_size,
    patched,
    png_of_size,
    refused,
    write_sound,
    write_video,
)
from PIL import Image

from mmfast.core.errors import MediaError
from mmfast.frontends.container import demuxed
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.video.reader import iter_video, read_video


@pytest.fixture(scope="module")
def clip(clip_path: Path) -> bytes:
    return clip_path.read_bytes()


@pytest.fixture(params=["video", "image", "stream", "kind"])
def read(request):
    """Every way in."""
    return {
        "video": lambda media: read_video(media, frames=4),
        "image": read_image,
        "stream": lambda media: next(iter(iter_video(media))),
        "kind": kind_of,
    }[request.param]


def test_what_is_not_a_file_at_all(read, tmp_path: Path) -> None:
    refused(lambda: read(tmp_path / "no.mp4"), "no.mp4", "does not exist", "check the path")
    refused(lambda: read(str(tmp_path)), tmp_path.name, "is a directory", "give one")
    refused(lambda: read(""), "empty", "give the name")
    refused(lambda: read("a\0b"), "not a path")
    refused(lambda: read("a\nb.mp4"), r"a\nb.mp4", "does not exist")
    refused(lambda: read("x" * 5000), "cannot be read")
    refused(lambda: read(b""), "is empty")
    refused(lambda: read(None), "NoneType" if read is not kind_of else "None", "give a path")
    refused(lambda: read(3.5), "3.5" if read is kind_of else "float", "give a path")
    (tmp_path / "void.mp4").touch()
    refused(lambda: read(tmp_path / "void.mp4"), "void.mp4", "empty (0 bytes)")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.mp4")
        refused(lambda: read(tmp_path / "pipe.mp4"), "not a regular file")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://example.com/a.mp4", "network sources are off; download the file first"),
        ("HTTPS://example.com/a.mp4", "network sources are off; download the file first"),
        ("rtsp://camera/1", "network sources are off; download the file first"),
        ("s3://bucket/a.mp4", "network sources are off; download the file first"),
        ("file:///etc/passwd", "file:// addresses are refused; give the plain path"),
        ("data:video/mp4;base64,AAAA", "data: addresses are refused"),
        ("concat:a.mp4|b.mp4", "does not exist"),
        ("pipe:0", "does not exist"),
    ],
)
def test_addresses_are_refused(read, address: str, why: str) -> None:
    refused(lambda: read(address), address, why)


def test_an_unreadable_file(read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret.mp4"
    path.write_bytes(b"x")

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(
            13, "Permission denied"
        )  # root may read anything, so chmod is no test

    monkeypatch.setattr(Path, "open", forbidden)
    refused(lambda: read(path), "secret.mp4", "Permission denied", "permissions")


def test_file_objects(read, clip_path: Path, tmp_path: Path) -> None:
    refused(lambda: read(io.StringIO("text")), "StringIO", "text, not bytes", "'rb'")
    file = clip_path.open("rb")
    file.close()
    refused(lambda: read(file), "clip.mp4", "closed file")
    refused(lambda: read(io.BytesIO()), "BytesIO", "is empty")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"these are words\nand more of them\n" * 50, id="text"),
        pytest.param(b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1:9/x.ts\n", id="playlist"),
        pytest.param(b"ffconcat version 1.0\nfile /etc/passwd\n", id="concat list"),
        pytest.param(b"<?xml version='1.0'?><MPD></MPD>", id="dash manifest"),
        pytest.param(b"v=0\nm=video 5004 RTP/AVP 96\n", id="session description"),
        pytest.param(b"%PDF-1.7 and so on", id="pdf"),
        pytest.param(b"PK\3\4" + bytes(100), id="zip"),
        pytest.param(bytes(1000), id="zeros"),
        pytest.param(b"\0", id="one byte"),
    ],
)
def test_other_files_renamed_to_mp4(read, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "renamed.mp4"
    path.write_bytes(content)
    refused(lambda: read(path), "renamed.mp4", "neither an image nor a video", "give one of")


def test_audio_only(tmp_path: Path) -> None:
    sound = write_sound(tmp_path / "sound.mp4")
    for read in (lambda: read_video(sound, frames=2), lambda: next(iter_video(sound))):
        refused(read, "sound.mp4", "only audio", "give a file with a picture")
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))
    for kind in (kind_of, read_image):
        refused(lambda kind=kind: kind(tmp_path / "sound.wav"), "sound.wav", "audio only (wav)")
    for head in (b"ID3\4", b"fLaC", b"\xff\xfb\x90\0", b"\xff\xf1\x50\x80"):
        refused(lambda head=head: kind_of(head + bytes(400)), "audio only")


@pytest.mark.parametrize("container", [{}, {"movflags": "faststart"}], ids=["end", "front"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_a_truncated_mp4(tmp_path: Path, container: dict[str, str], share: float) -> None:
    """Also where the index comes first and a player would show the part that is there."""
    path = write_video(tmp_path / "cut.mp4", container=container)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    for read in (lambda: read_video(path, frames=2), lambda: next(iter_video(path))):
        refused(read, "cut.mp4", "truncated", "again")


@pytest.mark.parametrize("suffix", ["mkv", "avi", "webp", "png", "jpg", "gif"])
def test_other_truncated_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"cut.{suffix}"
    if suffix in ("mkv", "avi"):
        write_video(path)
    else:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    refused(lambda: read_video(path, frames=2), f"cut.{suffix}", "truncated", "again")


@pytest.mark.parametrize(
    ("release", "known"), [("15.0.0", True), ("18.1.0", True), ("19.0.2", False)]
)
def test_a_release_of_pyav_is_asked_for_what_it_knows(
    release: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 19 on, which is for Python 3.12 and later, it takes tags that are no UTF-8 by itself."""
    monkeypatch.setattr("av.__version__", release)
    monkeypatch.setattr("av.open", lambda file, **options: options)
    expected = {"format": "mov", "options": {"a": "b"}}
    expected |= {"metadata_errors": "ignore"} if known else {}
    assert demuxed("clip.mp4", "mov", {"a": "b"}) == expected


def test_a_frame_rate_of_zero(clip: bytes, tmp_path: Path) -> None:
    """FFmpeg would guess a rate and give wrong times without a word."""
    read = lambda data: lambda: read_video(data, frames=2)
    refused(read(patched(clip, b"mdhd", 16, bytes(4))), "0 frames per second", "re-encode")
    refused(read(patched(clip, b"mvhd", 16, bytes(4))), "0 frames per second", "re-encode")
    runs = int.from_bytes(clip[(at := clip.index(b"stts") + 8) : at + 4], "big")
    for run in range(runs):
        clip = patched(clip, b"stts", 16 + 8 * run, bytes(4))
    refused(read(clip), "0 frames per second", "every mp4 sample lasts 0")
    avi = write_video(tmp_path / "a.avi", codec="mpeg4", bframes=0).read_bytes()
    refused(read(patched(avi, b"strh", 32, bytes(4))), "0 frames per second", "AVI rate 0")
    y4m = write_video(tmp_path / "a.y4m", codec="wrapped_avframe", bframes=None).read_bytes()
    assert len(read_video(y4m, frames=2)) == 2
    refused(read(y4m.replace(b"F30:1", b"F0:0 ", 1)), "0 frames per second", "YUV4MPEG2")


def test_a_video_of_one_pixel(tmp_path: Path) -> None:
    how = {"count": 2, "codec": "ffv1", "pix_fmt": "yuv444p", "bframes": None}
    path = write_video(
        tmp_path / "dot.mkv", size=(1, 1), stored=lambda n: np.zeros((1, 1, 3), np.uint8), **how
    )
    for read in (lambda: read_video(path, frames=2), lambda: next(iter_video(path))):
        refused(read, "dot.mkv", "1x1", "give a larger picture")
    refused(lambda: read_video(np.zeros((2, 1, 1, 3), np.uint8), frames=1), "1x1")
    refused(lambda: read_image(png_of_size(1, 1)), "1x1")


def test_a_video_in_place_of_a_picture(clip_path: Path) -> None:
    refused(lambda: read_image(clip_path), "where a picture belongs: give one of its frames")


@pytest.mark.parametrize("make", [png_of_size, jpeg_of_size])
def test_an_enormous_image_is_refused_from_its_header(
    read, make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded"))
    refused(lambda: read(make(20_000, 20_000)), "20000x20000", "Limits(pixels=...)")
    refused(lambda: read(make(12_000, 12_000)), "12000x12000 = 144,000,000 pixels")


def test_nothing_is_printed(clip: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """FFmpeg and decord write to the process's standard error when left alone."""
    path = tmp_path / "x.mp4"
    for data in (clip[:3000], clip[:200] + bytes(2000) + clip[2200:], clip + bytes(50)):
        path.write_bytes(data)
        for media in (path, data):
            try:
                read_video(media, frames=4)
            except MediaError as error:
                assert "\n" not in str(error)
    assert capfd.readouterr() == ("", "")
