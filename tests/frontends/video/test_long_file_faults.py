"""The parallel reader under damage, limits, early close and slow consumers."""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from long_file_clips import LIMITS, File, moving, same, write
from media_factory import refused, write_video

from mmfast.core.errors import MediaError
from mmfast.frontends.source import Damage
from mmfast.frontends.video import threads
from mmfast.frontends.video.reader import iter_video, read_video
from mmfast.frontends.video.threads import Ahead, LaneQueue, Stopped


@pytest.fixture(autouse=True)
def two_cores_and_short_clips(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "_WORTH", 0)
    monkeypatch.setattr("mmfast.frontends.video.threads.SLICE", 8)
    yield
    assert not slice_threads()


def slice_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "mmfast-slice"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> File:
    return File(write(tmp_path_factory.mktemp("faults"), "GOP 12"))


def test_early_close_stops_the_threads(clip: File) -> None:
    frames = clip.sliced(10.0, Ahead(frames=2))
    next(frames)
    assert slice_threads()
    frames.close()
    assert not slice_threads()


def test_a_reader_left_behind_ends_too(clip: File) -> None:
    frames = clip.sliced(10.0, Ahead(frames=2))
    next(frames)
    del frames
    assert not slice_threads()


@pytest.mark.parametrize("ahead", [Ahead(frames=3), Ahead(bytes=3 * 96 * 64 * 3)])
def test_a_slow_consumer_bounds_what_waits(
    clip: File, ahead: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[LaneQueue] = []
    made = LaneQueue.__init__

    def noted(self, *args, **kwargs) -> None:
        made(self, *args, **kwargs)
        orders.append(self)

    monkeypatch.setattr(LaneQueue, "__init__", noted)
    got = []
    for pair in clip.sliced(10.0, ahead):
        time.sleep(0.002)
        got.append(pair)
    assert same(got, clip.sequential(10.0))
    frames, size = orders[0].peak
    assert 1 <= frames <= 4 and size <= 4 * 96 * 64 * 3  # one over: the lane in turn may always add


def test_damage_gives_what_the_first_decoder_gives(tmp_path: Path, clip: File) -> None:
    """Each hole in turn; where slices fail the rest is decoded from the start."""
    whole = clip.source.data.read_bytes()  # type: ignore[union-attr]
    start, end = whole.index(b"mdat") + 4, whole.index(b"moov")
    gave_up = 0
    for share in (*(n / 20 for n in range(1, 20)), 0.77, 0.93):
        data = bytearray(whole)
        at = start + int(share * (end - start))
        data[at : at + 300] = bytes(255 - b for b in data[at : at + 300])
        path = tmp_path / f"hole{share}.mp4"
        path.write_bytes(data)
        file = File(path)
        for fps in (2.0, 12.0):
            assert same(iter_video(path, fps=fps), file.sequential(fps))
            try:
                list(file.sliced(fps))
            except Damage:
                gave_up += 1
    assert gave_up >= 5  # so that the test is about something


def test_an_error_comes_behind_the_frames_before_it(
    clip: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = clip.sequential(10.0)
    bad = want[7][1]
    convert = threads.SliceThreads._decode

    def fails(self, reader, lane, jobs) -> None:
        inner = self.convert

        def picky(frame, tick):
            if clip.header.seconds(tick) == bad:
                raise MediaError("spent")
            return inner(frame, tick)

        self.convert = picky if inner.__name__ != "picky" else inner
        convert(self, reader, lane, jobs)

    monkeypatch.setattr(threads.SliceThreads, "_decode", fails)
    got: list[object] = []
    with pytest.raises(MediaError, match="spent"):
        got.extend(clip.sliced(10.0))
    assert same(got, want[:7])


def test_a_file_that_cannot_be_opened_again(clip: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise MediaError("gone")

    monkeypatch.setattr(threads.packets, "slice_reader", gone)
    refused(lambda: list(clip.sliced(10.0)), "gone")


def test_frames_come_while_the_rest_is_not_even_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_video(
        tmp_path / "l.mp4", count=600, gop=20, bframes=0, options={"preset": "ultrafast"}
    )
    listed: list[int] = []
    from mmfast.frontends.video import threads

    look = threads.packets.unit_reader

    def counting(header):
        inner = look(header)
        return lambda packet: (listed.append(1), inner(packet))[1]

    monkeypatch.setattr(threads.packets, "unit_reader", counting)
    frames = iter_video(path, fps=1, ahead=Ahead(frames=4))
    assert len(list(islice(frames, 2))) == 2
    time.sleep(0.05)
    assert len(listed) < 400
    frames.close()  # type: ignore[attr-defined]


def test_all_frames_and_few_frames_take_the_old_way(
    clip: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads.SliceThreads, "items", lambda self: pytest.fail("sliced"))
    path = clip.source.data
    assert len(list(iter_video(path))) == 60
    assert len(read_video(path, frames=2, backend="pyav")) == 2
    monkeypatch.setattr(threads, "_WORTH", 100e6)
    assert same(iter_video(path, fps=3), clip.sequential(3))
    assert read_video(path, frames=20).backend == "decord"


def test_limits_hold(clip: File) -> None:
    from dataclasses import replace

    late = replace(LIMITS, seconds=-1.0)
    refused(lambda: read_video(clip.source.data, frames=20, limits=late), "took over -1 s")
    few = replace(LIMITS, frames=30)
    with pytest.raises(MediaError, match="frames"):
        list(iter_video(clip.source.data, fps=10, limits=few))


def test_the_size_of_the_first_frame_is_the_size_of_all(tmp_path: Path) -> None:
    """A second take of another size behind the first, with its own parameters in the stream."""
    options = {"preset": "ultrafast", "x264-params": "repeat-headers=1:annexb=1"}
    data = b"".join(
        write_video(tmp_path / f"{w}.ts", size=(w, 64), options=options, stored=None).read_bytes()
        for w in (96, 80)
    )
    frames = iter_video(data, fps=5)
    assert next(frames)[0].shape == (64, 96, 3)
    refused(lambda: list(frames), "changes its picture size")


def test_a_queue_in_order() -> None:
    order = LaneQueue(Ahead(frames=2))
    done: list[int] = []

    def lane(number: int) -> None:
        for item in range(5):
            order.put(number, (number, item), 1)
        order.end(number)
        done.append(number)

    threads = [threading.Thread(target=lane, args=(n,)) for n in (2, 1, 0)]
    for thread in threads:
        thread.start()
    order.finish(3)
    assert list(order.drain()) == [(n, i) for n in range(3) for i in range(5)]
    for thread in threads:
        thread.join()
    assert done == [0, 1, 2] and order.peak[0] <= 3
    order.stop()
    with pytest.raises(Stopped):
        order.put(9, 0, 1)


def test_pictures_that_roll_on_are_what_they_are() -> None:
    """The clips of these tests are only worth their name if pictures differ."""
    assert not np.array_equal(moving(3), moving(4))
