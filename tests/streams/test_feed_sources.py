"""A feed over real sources: decoding overlaps with the consumer, and ends when it ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from media_factory import number_of, picture, refused, write_video

from mmfast.frontends.live.source import Push, live_frames
from mmfast.frontends.source import Budget
from mmfast.frontends.video import threads
from mmfast.frontends.video.threads import Ahead
from mmfast.streams.feed import Feed
from mmfast.streams.stream import FakeClock

MINUTES, RATE = 10, 2


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten minutes of small pictures in groups of a minute."""
    return write_video(
        tmp_path_factory.mktemp("film") / "film.mp4",
        count=MINUTES * 60 * RATE,
        rate=RATE,
        gop=60 * RATE,
        options={"preset": "ultrafast", "x264-params": "bframes=2"},
    )


@pytest.mark.parametrize("sliced", [True, False])
def test_the_first_frames_of_a_film_arrive_before_its_decoding_ends(
    film: Path, sliced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    count = Budget.frame

    def counted(self: Budget, width: int, height: int) -> None:
        decoded.append(1)
        count(self, width, height)

    monkeypatch.setattr(Budget, "frame", counted)
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(threads, "_WORTH", 0 if sliced else 1e18)
    with Feed(live_frames(film, fps=1, ahead=40), ahead=Ahead(frames=4)) as feed:
        pairs = [next(feed) for _ in range(3)]
        early = len(decoded)
        assert early < 0.4 * MINUTES * 60 * RATE
        pairs += list(feed)
    assert [time for _, time in pairs] == list(range(MINUTES * 60))
    assert [number_of(frame) for frame, _ in pairs[:200]] == [n * RATE for n in range(200)]
    assert len(decoded) > 2 * early and feed.dropped == 0


def test_a_film_in_real_time_keeps_to_the_clock_and_drops_what_is_late(clip_path: Path) -> None:
    clock = FakeClock()
    live = live_frames(clip_path, fps=10)  # 16 frames in 1.6 s
    with Feed(live, clock=clock, realtime=True, latency=0.25) as feed:
        taken = [next(feed)[1]]
        for _ in range(15):
            clock.settle()
            clock.advance(0.1)
            if len(taken) < 4:  # keeps pace for a while, then hangs for the rest
                taken.append(next(feed)[1])
        while feed.stats()["arrived"] != 16:
            threading.Event().wait(0.001)
        taken += [time for _, time in feed]
    assert taken == pytest.approx([0, 0.1, 0.2, 0.3, 1.3, 1.4, 1.5], abs=0.02)
    assert feed.dropped == 9 and feed.arrived == feed.delivered + feed.dropped == 16


def test_closing_a_feed_wakes_a_source_that_hangs() -> None:
    release = threading.Event()

    def source() -> Iterator[np.ndarray]:
        yield picture(0)
        release.wait(30)

    feed = Feed(live_frames(source()))
    next(feed)
    feed.close()
    assert not [t for t in threading.enumerate() if t.name == "mmfast-feed"]
    release.set()


def test_closing_a_feed_ends_a_push_source() -> None:
    push, before = Push(), {*threading.enumerate()}
    feed = Feed(live_frames(push))
    push.push(picture(0), 0.0)
    next(feed)
    feed.close()
    refused(lambda: push.push(picture(1), 1.0), "has ended")
    for thread in {*threading.enumerate()} - before:
        if thread.name.startswith("mmfast"):
            thread.join(5)
            assert not thread.is_alive()


def test_errors_of_a_source_arrive_behind_its_frames() -> None:
    def source() -> Iterator[tuple[np.ndarray, float]]:
        yield picture(0), 0.0
        yield picture(1), 0.5
        raise OSError(5, "Input/output error")

    with Feed(live_frames(source())) as feed:
        assert [next(feed)[1], next(feed)[1]] == [0.0, 0.5]
        refused(lambda: next(feed), "died after 2 frames (Input/output error)")
