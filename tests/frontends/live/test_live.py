"""Every kind of source, and what a source can do wrong: a count or one line, never a hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from media_factory import number_of, numbers_of, patched, picture, refused, write_video
from PIL import Image

from mmfast.frontends.live.source import LiveSource, Push, live_frames, natural_key
from mmfast.frontends.source import Limits
from mmfast.frontends.video.reader import read_video

STEP = 0.1


def pairs(*numbers: int) -> Iterator[tuple[np.ndarray, float]]:
    return ((picture(n), n * STEP) for n in numbers)


def drain(source: object, **how: object) -> tuple[list[int], list[float], LiveSource]:
    live = live_frames(source, **how)
    got = list(live)
    return numbers_of(frame for frame, _ in got), [time for _, time in got], live


def steps(*numbers: float) -> object:
    return pytest.approx([n * STEP for n in numbers])


# --- kinds of sources ---------------------------------------------------------------------------


@pytest.mark.parametrize("fps", [None, 7.0])
def test_a_file_gives_what_read_video_gives(clip_path: Path, fps: float | None) -> None:
    sampling = {"frames": 10_000} if fps is None else {"fps": fps}
    clip = read_video(clip_path, **sampling)
    with clip_path.open("rb") as file:
        sources = [clip_path, str(clip_path), clip_path.read_bytes(), BytesIO(file.read())]
    for source in sources:
        numbers, times, _ = drain(source, fps=fps, timeout=60 if source is clip_path else None)
        assert numbers == list(clip.indices) and times == pytest.approx(clip.times, abs=1e-9)


def test_a_folder_in_natural_order(tmp_path: Path) -> None:
    for number, suffix in ((1, "png"), (2, "PNG"), (10, "png"), (11, "jpg"), (9, "bmp")):
        Image.fromarray(picture(number)).save(tmp_path / f"shot{number}.{suffix}", quality=95)
    (tmp_path / "notes.txt").write_text("not a picture")
    (tmp_path / ".hidden.png").write_text("not a picture")
    (tmp_path / "sub.png").mkdir()
    numbers, times, live = drain(tmp_path, rate=2)
    assert numbers == [1, 2, 9, 10, 11] and times == [0, 0.5, 1.0, 1.5, 2.0]
    assert live.events["broken"] == 1  # the directory called sub.png
    assert drain(str(tmp_path), rate=2, fps=1)[0] == [1, 9, 11]
    assert sorted(["b2", "a10", "b02", "a9"], key=natural_key) == ["a9", "a10", "b2", "b02"]
    (empty := tmp_path / "none").mkdir()
    refused(lambda: live_frames(empty), "none", "holds no picture")
    refused(lambda: live_frames(tmp_path, limits=Limits(frames=3)), "Limits(frames=...)")


def test_iterators_lists_and_arrays() -> None:
    frames = [picture(n) for n in range(4)]
    assert drain(iter(frames), rate=4)[:2] == ([0, 1, 2, 3], [0, 0.25, 0.5, 0.75])
    assert drain(frames, rate=4)[:2] == ([0, 1, 2, 3], [0, 0.25, 0.5, 0.75])
    assert drain(np.stack(frames), rate=4)[:2] == ([0, 1, 2, 3], [0, 0.25, 0.5, 0.75])
    assert drain(Image.fromarray(f) for f in frames)[1] == pytest.approx([n / 24 for n in range(4)])
    assert drain(pairs(5, 6, 9))[:2] == ([5, 6, 9], steps(5, 6, 9))  # a late start is kept


def test_sampling_of_a_live_source_takes_frames_as_they_come() -> None:
    taken: list[int] = []

    def source() -> Iterator[tuple[np.ndarray, float]]:
        for n in range(100):
            taken.append(n)
            yield picture(n), 3.0 + n / 10

    live = live_frames(source(), fps=2)
    for want in (0, 5, 10, 15):
        frame, time = next(live)
        assert number_of(frame) == want and time == pytest.approx(3 + want / 10)
    assert taken[-1] <= 15 + 6  # and not one frame later than that, but for what waits
    live.close()
    assert drain(pairs(0, 1, 2, 30, 31, 32), fps=5)[0] == [0, 2, 30, 32]  # a gap makes no burst


def test_pushed_frames() -> None:
    push = Push(held=2)
    live = live_frames(push)
    assert push.push(picture(3), 1.5)
    frame, time = next(live)
    assert number_of(frame) == 3 and time == 1.5
    worker = threading.Thread(target=lambda: [push.push(picture(n), n) for n in range(2, 9)])
    worker.start()
    assert [number_of(frame) for frame, _ in (next(live) for _ in range(7))] == list(range(2, 9))
    worker.join()
    push.push(picture(9), 9)
    push.end()
    assert number_of(next(live)[0]) == 9
    assert next(live, None) is None
    refused(lambda: push.push(picture(1)), "has ended")


def test_a_push_waits_no_longer_than_told_and_times_are_made_up() -> None:
    push = Push(held=2)
    assert push.push(picture(0)) and push.push(picture(1))
    assert not push.push(picture(2), patience=0.01)
    first, second = next(push)[1], next(push)[1]
    assert 0 == first < second < 10
    push.end(RuntimeError("cable out"))
    refused(lambda: next(live_frames(push)), "died after 0 frames (cable out)")


# --- what goes wrong ----------------------------------------------------------------------------


def test_a_stall_is_an_error_behind_the_frames_before_it() -> None:
    release = threading.Event()

    def source() -> Iterator[tuple[np.ndarray, float]]:
        yield from pairs(0, 1)
        release.wait(30)

    live = live_frames(source(), timeout=0.2)
    assert [number_of(frame) for frame, _ in (next(live), next(live))] == [0, 1]
    refused(lambda: next(live), "the frame iterator gave no frame for 0.2 s", "timeout=")
    assert next(live, None) is None
    release.set()


def test_close_does_not_wait_for_a_source_that_hangs() -> None:
    release = threading.Event()

    def source() -> Iterator[tuple[np.ndarray, float]]:
        yield from pairs(0)
        release.wait(30)

    with live_frames(source()) as live:
        next(live)
        threading.Timer(0.1, live.interrupt).start()
        assert next(live, None) is None
    release.set()


def test_death_in_the_middle() -> None:
    def source() -> Iterator[tuple[np.ndarray, float]]:
        yield from pairs(0, 1, 2)
        raise OSError(5, "Input/output error")

    live = live_frames(source())
    assert [number_of(next(live)[0]) for _ in range(3)] == [0, 1, 2]
    refused(lambda: next(live), "the frame iterator died after 3 frames (Input/output error)")
    assert next(live, None) is None


def test_a_clock_set_back_goes_on() -> None:
    numbers, times, live = drain(pairs(50, 51, 52, 0, 1, 2))
    assert numbers == [50, 51, 52, 0, 1, 2] and times == steps(50, 51, 52, 53, 54, 55)
    assert live.events["jumps"] == 1 and live.events["late"] == 0


def test_a_short_clip_played_again_goes_on_too() -> None:
    numbers, times, live = drain(pairs(0, 1, 2, 3, 0, 1, 2, 3, 4))
    assert numbers == [0, 1, 2, 3, 2, 3, 4] and times == steps(0, 1, 2, 3, 4, 5, 6)
    assert (live.events["late"], live.events["jumps"]) == (2, 1)


def test_frames_out_of_order_are_dropped_and_shift_nothing() -> None:
    numbers, times, live = drain(pairs(0, 1, 3, 2, 4, 6, 5, 7))
    assert numbers == [0, 1, 3, 4, 6, 7] and times == steps(0, 1, 3, 4, 6, 7)
    assert (live.events["late"], live.events["jumps"]) == (2, 0)


def test_repeated_frames_are_dropped() -> None:
    numbers, times, live = drain(pairs(0, 0, 1, 1, 1, 2))
    assert numbers == [0, 1, 2] and times == steps(0, 1, 2)
    assert live.events["repeated"] == 3


def test_a_clock_that_stands_still_ends_in_an_error() -> None:
    small = np.zeros((2, 2, 3), np.uint8)
    live = live_frames((small, 4.0) for _ in iter(int, 1))
    next(live)
    refused(lambda: next(live), "clock of the frame iterator stands still", "1000 frames at 4 s")


def test_another_size_is_scaled_into_the_first() -> None:
    sizes = [(96, 64), (192, 128), (96, 64), (96, 96)]
    live = live_frames((picture(5 + i, *size), i) for i, size in enumerate(sizes))
    got = [frame for frame, _ in live]
    assert {frame.shape for frame in got} == {(64, 96, 3)}
    assert numbers_of(got[:3]) == [5, 6, 7] and live.events["resized"] == 2
    assert not got[3][:, :16].any() and not got[3][:, -16:].any()  # bars left and right
    assert got[3][40:60, 18:46, 0].min() > 190


def test_broken_frames_are_skipped() -> None:
    good = picture(1)
    bad = [None, np.zeros((4, 4)) * np.nan, b"no picture", np.zeros((5, 5, 7), np.uint8)]
    items = [(bad[0], 0), (good, 1), *((b, 2) for b in bad), (good, float("nan")), (good, 3)]
    numbers, times, live = drain(iter(items))
    assert numbers == [1, 1] and times == [1, 3] and live.events["broken"] == 6


def test_nothing_but_broken_frames_is_an_error() -> None:
    nan = np.full((4, 4, 3), np.nan)
    endless = live_frames(nan for _ in iter(int, 1))
    refused(lambda: next(endless), "the frame iterator gave 30 broken frames in a row", "NaN")
    refused(lambda: next(live_frames([nan, nan])), "no usable frame", "NaN")
    refused(lambda: next(live_frames(iter([]))), "no usable frame (it is empty)")


def test_a_file_that_changes_its_size_or_ends_early_says_so(tmp_path: Path) -> None:
    data = write_video(tmp_path / "a.ts").read_bytes()
    data += write_video(tmp_path / "b.ts", size=(64, 48)).read_bytes()
    live = live_frames(data)
    assert number_of(next(live)[0]) == 0
    refused(lambda: list(live), "changes its picture size from 96x64 to 64x48")
    assert next(live, None) is None


def test_a_file_whose_frames_last_no_time_is_refused(clip_path: Path) -> None:
    data = clip_path.read_bytes()
    refused(lambda: live_frames(patched(data, b"mdhd", 16, bytes(4))), "0 frames per second")


def test_a_recording_of_two_takes_goes_on(tmp_path: Path) -> None:
    """A transport stream whose clock starts again, as after a reconnection."""
    take = write_video(tmp_path / "a.ts", bframes=0).read_bytes()
    live = live_frames(take + take)
    got = list(live)
    times = [time for _, time in got]
    assert len(got) >= 90 and (np.diff(times) > 0).all() and live.events["jumps"] == 1


def test_arguments(tmp_path: Path) -> None:
    refused(lambda: live_frames(tmp_path / "no.mp4"), "no.mp4", "does not exist")
    refused(lambda: live_frames([], fps=0), "fps=0")
    refused(lambda: live_frames([], rate=-1), "rate=-1")
    refused(lambda: live_frames([], timeout=0), "timeout=0", "not a delay")
    refused(lambda: live_frames([], ahead=0), "ahead=0")
    for wrong in (None, 3.5, {"a": 1}):
        refused(lambda wrong=wrong: next(live_frames(wrong)), "give a path")
