"""A feed hands over every frame in order, or the newest ones in time, and ends when told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from mmfast.core.errors import MediaError, SpecError
from mmfast.frontends.video.threads import Ahead
from mmfast.streams.feed import Feed
from mmfast.streams.stream import Clock, FakeClock


def frame(number: int, size: int = 4) -> np.ndarray:
    return np.full((size, size, 3), number % 256, np.uint8)


def numbered(count: int, step: float = 1.0) -> Iterator[tuple[np.ndarray, float]]:
    for number in range(count):
        yield frame(number), number * step


BEFORE: set[threading.Thread] = set()


def mmfast_threads() -> list[str]:
    new = {*threading.enumerate()} - BEFORE
    return [thread.name for thread in new if thread.name.startswith("mmfast")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Pools of the whole process, such as that for names of hosts, may have been there before."""
    BEFORE.clear()
    BEFORE.update(threading.enumerate())
    yield
    assert not mmfast_threads()


def test_without_a_latency_every_frame_arrives_in_order() -> None:
    with Feed(numbered(200), ahead=Ahead(frames=3)) as feed:
        pairs = list(feed)
    assert [time for _, time in pairs] == list(range(200))
    assert all((got == frame(i)).all() for i, (got, _) in enumerate(pairs))
    assert (feed.arrived, feed.delivered, feed.dropped) == (200, 200, 0)


@pytest.mark.parametrize("ahead", [Ahead(frames=3), Ahead(frames=99, bytes=3 * 48)])
def test_what_waits_is_bounded_by_frames_and_by_bytes(ahead: Ahead) -> None:
    asked: list[int] = []

    def source() -> Iterator[tuple[np.ndarray, float]]:
        for number in range(50):
            asked.append(number)
            yield frame(number), float(number)

    with Feed(source(), ahead=ahead) as feed:
        for taken in range(1, 20):
            next(feed)
            assert feed.stats()["waiting"] <= 3 and feed.stats()["waiting_bytes"] <= 3 * 48
            assert len(asked) <= taken + 3 + 1  # one is held by the source's thread


def test_a_frame_larger_than_the_bound_passes_alone() -> None:
    with Feed(numbered(5), ahead=Ahead(frames=4, bytes=10)) as feed:
        assert [time for _, time in feed] == [0, 1, 2, 3, 4]


def test_an_error_comes_behind_the_frames_before_it() -> None:
    def source() -> Iterator[tuple[np.ndarray, float]]:
        yield from numbered(3)
        raise MediaError("the camera died")

    feed = Feed(source())
    assert [next(feed)[1] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(MediaError, match="the camera died"):
        next(feed)
    with pytest.raises(StopIteration):
        next(feed)
    feed.close()


def test_real_time_pacing_releases_frames_at_their_times() -> None:
    clock = FakeClock(100.0)
    with Feed(((frame(i), 7.0 + i) for i in range(4)), clock=clock, realtime=True) as feed:
        assert next(feed)[1] == 7.0  # the first one at once, whatever its time
        clock.settle()
        assert feed.stats()["waiting"] == 0
        clock.advance(0.999)
        clock.settle()
        assert feed.stats()["waiting"] == 0
        clock.advance(0.001)
        assert next(feed)[1] == 8.0
        clock.settle()
        clock.advance(2.0)
        assert [next(feed)[1], next(feed)[1]] == [9.0, 10.0]
        with pytest.raises(StopIteration):
            next(feed)
    assert feed.dropped == 0


def test_late_frames_are_dropped_oldest_first_and_counted() -> None:
    clock = FakeClock()
    with Feed(numbered(6), clock=clock, realtime=True, latency=1.5) as feed:
        assert next(feed)[1] == 0
        for _ in range(4):  # frames 1 to 4 arrive while the consumer is busy
            clock.settle()
            clock.advance(1.0)
        clock.settle()
        assert feed.lag == 3.0 and feed.stats()["waiting"] == 4
        assert next(feed)[1] == 3  # 1 and 2 have waited longer than 1.5 s
        assert (feed.dropped, feed.lag) == (2, 0.0)
        assert next(feed)[1] == 4
        clock.advance(1.0)
        assert next(feed)[1] == 5
    assert (feed.arrived, feed.delivered, feed.dropped) == (6, 4, 2)


def test_the_newest_frame_is_never_dropped() -> None:
    clock = FakeClock()
    with Feed(numbered(2), clock=clock, realtime=True, latency=0.1) as feed:
        next(feed)
        clock.settle()
        clock.advance(1.0)
        while feed.stats()["waiting"] == 0:
            threading.Event().wait(0.001)
        clock.advance(50.0)
        assert feed.lag == 50.0
        assert next(feed)[1] == 1 and feed.dropped == 0


def test_with_a_latency_a_full_queue_loses_its_oldest() -> None:
    done = threading.Event()

    def source() -> Iterator[tuple[np.ndarray, float]]:
        yield from numbered(10)
        done.set()

    with Feed(source(), latency=5.0, clock=FakeClock(), ahead=Ahead(frames=3)) as feed:
        assert done.wait(10)
        times = [time for _, time in feed]
    assert times == [7, 8, 9] and feed.dropped == 7
    assert feed.arrived == feed.delivered + feed.dropped


@pytest.mark.parametrize("realtime", [False, True])
def test_close_ends_the_source_and_joins_its_thread(realtime: bool) -> None:
    closed = threading.Event()

    def source() -> Iterator[tuple[np.ndarray, float]]:
        try:
            yield from numbered(10**9)
        finally:
            closed.set()

    feed = Feed(source(), ahead=Ahead(frames=2), realtime=realtime)
    next(feed)
    feed.close()
    assert closed.is_set() and not mmfast_threads()
    with pytest.raises(StopIteration):
        next(feed)
    feed.close()


def test_close_wakes_a_source_that_waits() -> None:
    class Stuck:
        def __init__(self) -> None:
            self.woken = threading.Event()

        def __iter__(self) -> Iterator[tuple[np.ndarray, float]]:
            yield frame(0), 0.0
            self.woken.wait(30)

        def interrupt(self) -> None:
            self.woken.set()

    feed = Feed(Stuck())
    next(feed)
    feed.close()
    assert not mmfast_threads()


def test_a_waiting_consumer_is_woken_by_close() -> None:
    clock = FakeClock()
    feed = Feed(numbered(2), clock=clock, realtime=True)
    next(feed)
    ended = threading.Event()

    def consume() -> None:
        with pytest.raises(StopIteration):
            next(feed)
        ended.set()

    thread = threading.Thread(target=consume)
    thread.start()
    clock.settle()
    feed.close()
    assert ended.wait(10)
    thread.join()


def test_arguments() -> None:
    for latency in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(SpecError, match="not a delay"):
            Feed(numbered(1), latency=latency)
    for wrong in ({"frames": 0}, {"bytes": 0}):
        with pytest.raises(MediaError, match="at least 1"):
            Ahead(**wrong)


def test_the_system_clock_waits_and_wakes() -> None:
    clock, condition = Clock(), threading.Condition()
    start = clock.now()
    with condition:
        clock.wait(condition, start + 0.02)
        clock.wait(condition, start - 1)
    assert clock.now() - start >= 0.019


def test_a_fake_clock_loses_no_wake_up() -> None:
    clock, condition, passed = FakeClock(), threading.Condition(), []

    def sleeper() -> None:
        for moment in range(1, 200):
            with condition:
                while clock.now() < moment:
                    clock.wait(condition, float(moment))
            passed.append(moment)

    thread = threading.Thread(target=sleeper)
    thread.start()
    while thread.is_alive():
        clock.advance(0.5)
    assert passed == list(range(1, 200))
    with pytest.raises(TimeoutError):
        clock.settle(patience=0.01)


def test_a_moment_that_has_passed_is_not_waited_for() -> None:
    """Also where the clock moved between the decision to wait and the waiting."""
    clock, condition = FakeClock(5.0), threading.Condition()

    def sleeper() -> None:
        with condition:
            clock.wait(condition, 5.0)

    thread = threading.Thread(target=sleeper, daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
