"""Videos that other libraries have opened give the frames and times that their files give."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from media_factory import restamped, turned, write_video

import mmfast
from mmfast.core.errors import MediaError
from mmfast.frontends.image import kind_of, read_image
from mmfast.frontends.video.reader import iter_video, read_video

CLIPS = sorted((Path(__file__).resolve().parents[3] / "assets" / "clips").glob("*.mp4"))

UNEVEN = [0, 512, 2048, 2560, 5120, 9216]


def decord_reader(path: Path) -> Any:
    return pytest.importorskip("decord").VideoReader(str(path))


def torchcodec_decoder(path: Path) -> Any:
    try:
        from torchcodec.decoders import VideoDecoder
    except (ImportError, RuntimeError, OSError):  # it needs FFmpeg's libraries
        pytest.skip("no torchcodec, or no FFmpeg for it")
    return VideoDecoder(str(path))


def started(path: Path) -> Any:
    """An open container of which frames were taken already."""
    container = av.open(str(path))
    next(container.decode(video=0))
    return container


OPENED: list[Callable[[Path], Any]] = [
    decord_reader,
    torchcodec_decoder,
    lambda path: av.open(str(path)),
    started,
    lambda path: av.open(str(path)).decode(video=0),
    lambda path: list(av.open(str(path)).decode(video=0)),
]


@pytest.mark.parametrize("opened", OPENED)
def test_what_is_open_reads_like_its_file(opened: Callable[[Path], Any]) -> None:
    rng = random.Random(3)
    for path in rng.sample(CLIPS, 2):
        end = read_video(path, frames=1).duration
        times = sorted(rng.uniform(0, end * 0.99) for _ in range(3))
        for ask in ({"frames": rng.randint(1, 9)}, {"fps": rng.uniform(1, 9)}, {"times": times}):
            file, mine = read_video(path, **ask), read_video(opened(path), **ask)
            assert (file.frames == mine.frames).all() and mine.indices == file.indices
            assert mine.times == pytest.approx(file.times) and kind_of(opened(path)) == "video"
        pairs = zip(iter_video(opened(path)), iter_video(path), strict=True)
        for (frame, time), (other, at) in pairs:
            assert (frame == other).all() and time == pytest.approx(at)


@pytest.mark.parametrize(
    ("matrix", "opened"),
    [
        *[[turn, each] for turn in ((0, 1, -1, 0), (-1, 0, 0, -1)) for each in OPENED],
        *[[(-1, 0, 0, 1), each] for each in OPENED[2:]],  # decord and torchcodec do not mirror
    ],
)
def test_phone_rotation_is_applied(
    tmp_path: Path, matrix: tuple[int, ...], opened: Callable[[Path], Any]
) -> None:
    plain, path = tmp_path / "plain.mp4", tmp_path / "turned.mp4"
    write_video(plain, count=20)
    path.write_bytes(turned(plain.read_bytes(), *matrix))
    file, mine = read_video(path, frames=3), read_video(opened(path), frames=3)
    assert np.array_equal(file.frames, mine.frames)


@pytest.mark.parametrize("opened", OPENED)
def test_uneven_times_are_kept(tmp_path: Path, opened: Callable[[Path], Any]) -> None:
    path = restamped(write_video(tmp_path / "even.mp4", count=6), tmp_path / "uneven.mp4", UNEVEN)
    file, mine = read_video(path, frames=6), read_video(opened(path), frames=6)
    assert mine.times == pytest.approx(file.times) and len({*np.diff(file.times).round(3)}) > 2


def test_readers_decode_what_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = decord_reader(CLIPS[0]), []
    own = type(reader).__getitem__
    monkeypatch.setattr(type(reader), "__getitem__", lambda s, i: read.append(i) or own(s, i))
    clip = read_video(reader, frames=3)
    assert read == list(clip.indices) and clip.total_frames > 3


def test_single_frames_are_pictures() -> None:
    frame = next(av.open(str(CLIPS[0])).decode(video=0))
    first = read_video(CLIPS[0], frames=1).frames[0]
    reader = decord_reader(CLIPS[0])
    for picture in (frame, reader[0]):
        assert kind_of(picture) == "image" and (read_image(picture) == first).all()
    clip = read_video(reader.get_batch([0, 1]), frames=2)
    assert (clip.frames[0] == first).all()


def test_what_has_no_picture_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "sound.mka"
    with av.open(str(path), "w") as output:
        output.add_stream("pcm_s16le", rate=8000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), layout="mono")
        sound.sample_rate = 8000
        output.mux(output.streams.audio[0].encode(sound))
    with pytest.raises(MediaError, match="no video stream") as error:
        read_video(av.open(str(path)), frames=2)
    assert "\n" not in str(error.value)
    closed = av.open(str(CLIPS[0]))
    closed.close()
    with pytest.raises(MediaError, match="PyAV container"):
        read_video(closed, frames=2)


def test_pipelines_take_them_and_lists_of_them() -> None:
    pipe = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=8)
    question = "Which way does the red circle move?"
    path = next(each for each in CLIPS if each.name == "red-circle.mp4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = pipe(path, question).text
        assert pipe(decord_reader(path), question).text == said
        both = pipe([decord_reader(path), av.open(str(path))], question)
    assert [each.text for each in both] == [said, said]
