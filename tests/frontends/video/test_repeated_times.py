"""Frames whose times repeat or run back: spread between their neighbours, by every reader alike."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_factory import numbers_of, picture, refused, restamped, write_video

from mmfast.core.errors import MediaError
from mmfast.frontends.live.source import live_frames
from mmfast.frontends.sampling import rising
from mmfast.frontends.video import threads
from mmfast.frontends.video.reader import iter_video, read_video
from mmfast.serve.guard.sandbox import decode

COUNT, STEP, BACK = 100, 40, "a little back"
EVEN = [STEP * i for i in range(COUNT)]


def replaced(**at: int) -> list[int]:
    """Even times in milliseconds, but for some: `_50=1960`."""
    times = list(EVEN)
    for name, time in at.items():
        times[int(name[1:])] = time
    return times


MENDED = {
    "one": replaced(_50=EVEN[49]),
    "the second": replaced(_1=EVEN[0]),
    "the last": replaced(_99=EVEN[98]),
    "three in a row": replaced(_50=EVEN[49], _51=EVEN[49], _52=EVEN[49]),
    "three at the end": replaced(_97=EVEN[96], _98=EVEN[96], _99=EVEN[96]),
    "sixteen": replaced(**{f"_{i}": EVEN[20] for i in range(21, 37)}),
    "in several places": replaced(_10=EVEN[9], _30=EVEN[29], _31=EVEN[29], _70=EVEN[69]),
    BACK: replaced(_60=EVEN[58] - 5),
    "back and again": replaced(_60=EVEN[58] - 5, _61=EVEN[59]),
    "every second": [2 * STEP * (i // 2) for i in range(COUNT)],
}
REFUSED = {
    "all equal": [0] * COUNT,
    "backwards": EVEN[::-1],
    "half of them again": [*EVEN[:50], *EVEN[:50]],
    "seventeen": replaced(**{f"_{i}": EVEN[20] for i in range(21, 38)}),
}


def wanted(times: list[int]) -> list[float]:
    """Seconds by interpolation between the frames that are later than all before them."""
    sure = [i for i, time in enumerate(times) if i == 0 or time > max(times[:i])]
    found = np.interp(range(len(times)), sure, [times[i] for i in sure])
    for i in range(sure[-1] + 1, len(times)):
        found[i] = 2 * found[i - 1] - found[i - 2]
    return [float(time) / 1000 for time in found]


def unsure(times: list[int]) -> int:
    return sum(time <= max(times[:i]) for i, time in enumerate(times) if i)


@pytest.fixture(scope="module")
def stamped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[list[int], str, int], Path]:
    folder = tmp_path_factory.mktemp("repeated")
    made: dict[object, Path] = {}

    def make(times: list[int], suffix: str = "mkv", bframes: int = 0) -> Path:
        key = (tuple(times), suffix, bframes)
        if bframes not in made:
            path = folder / f"even{bframes}.mp4"
            made[bframes] = write_video(path, count=COUNT, rate=25, bframes=bframes)
        if key not in made:
            out = folder / f"{len(made)}.{suffix}"
            made[key] = restamped(made[bframes], out, times)
        return made[key]

    return make


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that clips this short are decoded by threads where they can be."""
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "_WORTH", 0)
    monkeypatch.setattr(threads, "SLICE", 8)


# One time alone that runs back may as well be that of a frame decoded out of turn, where a file
# may hold such frames.
KINDS = [(name, kind) for name in MENDED for kind in ("mkv", "mp4", "B-frames")]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("name", "kind"), [k for k in KINDS if k[0] != BACK or k[1] == "mkv"])
def test_every_reader_gives_the_same_times(name: str, kind: str, stamped) -> None:
    times, seconds = MENDED[name], pytest.approx(wanted(MENDED[name]), abs=1e-9)
    path = stamped(times, *({"B-frames": ("mkv", 2)}.get(kind, (kind, 0))))
    clip = read_video(path, frames=COUNT)
    assert clip.times == seconds and numbers_of(clip.frames) == list(range(COUNT))
    assert clip.mended == unsure(times) and clip.total_frames == COUNT

    events: Counter[str] = Counter()
    frames, streamed = zip(*iter_video(path, events=events), strict=True)
    assert list(streamed) == list(clip.times) and numbers_of(frames) == list(range(COUNT))
    assert events["mended"] == clip.mended

    with live_frames(path) as live:
        assert [time for _, time in live] == list(clip.times)
        assert live.events == Counter(mended=clip.mended)

    limits = {"seconds": 60.0}
    job = {"kind": "video", "limits": limits, "frames": COUNT}
    pixels, facts = decode(job | {"frame_pixels": 1 << 20, "clip_pixels": 1 << 30}, str(path))
    assert np.array_equal(pixels, clip.frames) and facts["mended"] == clip.mended
    assert facts["metadata"] == clip.metadata()


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("name", MENDED)
@pytest.mark.parametrize("fps", [3.0, 12.5, 60.0])
def test_sampled_frames_agree(name: str, fps: float, stamped) -> None:
    path = stamped(MENDED[name])
    clip = read_video(path, fps=fps)
    frames, times = zip(*iter_video(path, fps=fps), strict=True)
    assert list(times) == list(clip.times)
    assert np.array_equal(np.stack(frames), clip.frames)
    some = read_video(path, times=[1.0, 0.2, 3.1], backend="pyav")
    whole = np.array(wanted(MENDED[name]))
    assert some.indices == tuple(np.flatnonzero(whole <= t + 5e-4)[-1] for t in (1.0, 0.2, 3.1))


def test_each_reading_warns_once(stamped, caplog: pytest.LogCaptureFixture) -> None:
    path = stamped(MENDED["in several places"])
    for read in (lambda: read_video(path, frames=8), lambda: list(iter_video(path, fps=5))):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mmfast"):
            read()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "frame 10" in caplog.text and "between their neighbours" in caplog.text
    caplog.clear()
    assert read_video(stamped(EVEN), frames=8).mended == 0 and not caplog.records


def test_decord_leaves_them_to_pyav(stamped) -> None:
    path = stamped(MENDED["one"], "mp4")
    assert read_video(path, frames=8).backend == "pyav"
    refused(lambda: read_video(path, frames=8, backend="decord"), "repeated times", "auto")


@pytest.mark.parametrize("name", REFUSED)
def test_broken_clocks_are_refused_by_every_reader(name: str, stamped) -> None:
    path = stamped(REFUSED[name])
    words = "no usable times", "re-encode it with a rate"
    refused(lambda: read_video(path, frames=8), *words)
    if name == "half of them again":  # live sources follow a clock that starts again
        assert len(list(live_frames(path))) > 90
        return
    for read in (
        lambda: list(iter_video(path)),
        lambda: list(iter_video(path, fps=5)),
        lambda: list(live_frames(path)),
    ):
        refused(read, *words)


def test_pictures_with_seconds() -> None:
    pairs = [(picture(i), 0.1 * i if i != 5 else 0.4) for i in range(10)]
    clip = read_video(pairs, frames=10)
    assert clip.mended == 1 and clip.times == pytest.approx([0.1 * i for i in range(4)] + [
        0.4, 0.5, 0.6, 0.7, 0.8, 0.9])  # fmt: skip
    assert [time for _, time in iter_video(pairs)] == list(clip.times)
    still = [(picture(i), 1.0) for i in range(10)]
    refused(lambda: read_video(still, frames=2), "no usable times")
    refused(lambda: list(iter_video(still)), "no usable times")


@given(st.lists(st.integers(-3, 12), min_size=1, max_size=60))
def test_rising_follows_interpolation(steps: list[int]) -> None:
    times = np.cumsum(steps).tolist()
    sure = [i for i, time in enumerate(times) if i == 0 or time > max(times[:i])]
    runs = np.diff([*sure, len(times)]) - 1
    events: Counter[str] = Counter()
    pairs = enumerate(times)
    if runs.max() > 16 or (len(sure) == 1 and len(times) > 1):
        with pytest.raises(MediaError):
            list(rising(pairs, "it", events))
        return
    items, found = zip(*rising(pairs, "it", events), strict=True)
    assert items == tuple(range(len(times)))
    assert [time / 1000 for time in found] == pytest.approx(wanted(times))
    assert all(a < b for a, b in pairwise(found))
    assert events["mended"] == len(times) - len(sure)
