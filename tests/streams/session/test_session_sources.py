"""What sources do wrong, background watching, drops, saving and going on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream_tools import EMBEDDED, answer_logits, full_pipe, seconds, shared_pipe, watcher

from mmfast.core.errors import MediaError, MmfastError
from mmfast.streams.stream import FakeClock, Timeline

FAMILY = "qwen3_vl"
QUESTION = "what moves?"
MEMORY = "sink:40+window:220+retrieve:3"


def test_times_ascend_whatever_a_source_says() -> None:
    line, found = Timeline(), []
    for time in (5.0, 5.5, 5.5, 5.4, 6.0, 0.0, 0.5, None, 1.5):
        line, now = line.step(time, 0.5)
        found.append(now)
    assert found == [5.0, 5.5, None, None, 6.0, 6.5, 7.0, 7.5, 8.0]
    assert (line.repeated, line.late, line.jumps) == (1, 1, 1)
    line, now = line.again().step(0.0, 0.5)  # another source is no fault
    assert now == 8.5 and line.jumps == 1
    assert line.step(0.0, 0.5)[1] is None  # and only its first frame may begin anew


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
def test_odd_frames_are_counted_and_the_stream_goes_on(family: str) -> None:
    this, pipe = watcher(family), shared_pipe(family)
    clip = this.clip(8)
    larger = np.random.default_rng(3).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    with pipe.open() as session:
        for frame, time in zip(clip[:4], (3.0, 3.5, 3.5, 3.2), strict=True):
            session.push(frame, time)
        session.push(clip[4], 0.0)
        for i in range(3):  # another size: what waited for a partner stands alone
            session.push(larger, 0.5 + i / 2)
        stats = session.stats()
        odd = {"repeated": 1, "late": 1, "jumps": 1, "resized": 1}
        assert stats["source_events"] == odd and stats["frames"] == 8
        assert session.ask(QUESTION, max_new_tokens=2).read() is not None


def source_that_dies(clip: Any) -> Iterator[tuple[Any, float]]:
    for i, frame in enumerate(clip):
        yield frame, i / 2
    raise OSError("cable pulled")


def test_a_source_that_dies() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    clip = this.clip(4)
    with pipe.open() as session, pipe.open() as other:
        with pytest.raises(MediaError, match="cable pulled"):
            session.watch(source_that_dies(clip))
        watch = other.watch(source_that_dies(clip), background=True)
        with pytest.raises(MediaError, match="cable pulled"):
            watch.join(60)
        for each in (session, other):
            assert each.stats()["units"] == 2 and "cable pulled" in each.stats()["errors"][0]
        assert torch.equal(answer_logits(session, QUESTION), answer_logits(other, QUESTION))
        assert session.push(clip[:2], seconds(2, start=9.0)) == 1


def test_watching_is_pushing_and_a_second_source_goes_on() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    clip = this.clip(8)
    pairs = list(zip(clip, seconds(8), strict=True))
    with pipe.open(MEMORY) as watched, pipe.open(MEMORY) as pushed:
        seen: list[float] = []
        watched.watch(iter(pairs[:4]), each=seen.append)
        watched.watch(iter([(f, t - 2.0) for f, t in pairs[4:]]), background=True).join(60)
        pushed.push(clip, seconds(8))
        assert seen == seconds(4) and watched.stats()["source_events"]["jumps"] == 0
        assert torch.equal(answer_logits(watched, QUESTION), answer_logits(pushed, QUESTION))


def test_late_frames_are_dropped_and_counted() -> None:
    """The model is busy for three seconds: of the frames that came meanwhile the oldest go."""
    this, pipe = watcher("llava_onevision"), shared_pipe("llava_onevision")
    clip, clock = this.clip(8), FakeClock()
    go = threading.Event()

    def camera() -> Iterator[tuple[Any, float]]:
        for i, frame in enumerate(clip):
            yield frame, float(i)
            if i == 0:
                go.wait(30)

    with pipe.open() as session:
        stopped: list[float] = []

        def busy(now: float) -> None:
            if not stopped:
                stopped.append(now)
                go.set()
                running = session.sources.running
                while running and running[0].feed.arrived < len(clip):
                    threading.Event().wait(0.01)
                clock.advance(3.0)

        watch = session.watch(camera(), fps=None, latency=1.0, clock=clock, each=busy)
        stats = session.stats()
        assert watch.feed.dropped == stats["dropped"] == 6
        assert stats["frames"] == 2 and stats["seconds"] == 7.0  # the first and the newest


def test_closing_ends_a_source_that_never_does() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    frame, seen = this.clip(1)[0], threading.Event()

    def endless() -> Iterator[tuple[Any, float]]:
        time = 0.0
        while True:
            yield frame, time
            time += 0.5

    with pipe.open(MEMORY) as session:
        watch = session.watch(endless(), background=True, each=lambda _: seen.set())
        assert seen.wait(60)  # before its first frame a stream answers nothing
        answers = [session.ask(QUESTION, max_new_tokens=2).read() for _ in range(3)]
        assert len(answers) == 3 and watch.running
    assert watch.join(60) and session.closed


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", EMBEDDED])
def test_saved_sessions_go_on_bit_for_bit(family: str, tmp_path: Path) -> None:
    """Cut anywhere, with a frame that waits, stored blocks, a gate, a cache and a reducer."""
    this = watcher(family)
    pipe = full_pipe(family)
    clip, times = this.clip(9), seconds(9)
    with pipe.open(MEMORY) as whole:
        whole.push(clip, times)
        wanted = answer_logits(whole, QUESTION)
        figures = whole.stats()
    for cut in (0, 1, 5):
        with pipe.open(MEMORY) as session:
            session.push(clip[:cut], times[:cut]) if cut else None
            session.save(tmp_path / str(cut))
        del session
        with pipe.restore(tmp_path / str(cut)) as again:
            again.push(clip[cut:], times[cut:])
            assert torch.equal(answer_logits(again, QUESTION), wanted)
            mine = again.stats()
            for name in ("frames", "units", "tokens", "seconds"):
                assert mine[name] == figures[name]
            for name in ("live_tokens", "blocks", "position", "evicted_tokens", "rebases"):
                assert mine["memory"][name] == figures["memory"][name]


def test_remembered_exchanges_are_saved(tmp_path: Path) -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    with pipe.open(MEMORY) as session:
        session.push(this.clip(3), seconds(3))
        session.ask(QUESTION, remember=True, max_new_tokens=3).read()
        session.save(tmp_path)
        with pipe.restore(tmp_path) as again:
            for each in (session, again):
                each.push(this.clip(2, 1), seconds(2, start=2.0))
            assert torch.equal(answer_logits(session, "?"), answer_logits(again, "?"))


def test_what_cannot_be_restored(tmp_path: Path) -> None:
    this, pipe = watcher("llava_onevision"), shared_pipe("llava_onevision")
    with pytest.raises(MmfastError):
        pipe.restore(tmp_path / "nowhere")
    with pipe.open() as session:
        session.push(this.clip(1)[0])
        session.save(tmp_path)
        with pytest.raises(MmfastError, match="folder=5 is no path; give the name"):
            session.save(5)  # type: ignore[arg-type]
        with pytest.raises(MmfastError, match="timeout='soon' is no delay"):
            session.wait_until("a car stops", timeout="soon")  # type: ignore[arg-type]
        with pytest.raises(MmfastError, match="question is a NoneType"):
            session.wait_until(None, timeout=1)  # type: ignore[arg-type]
    with pytest.raises(MmfastError, match="another model"):
        shared_pipe("qwen3_vl").restore(tmp_path)
    with pytest.raises(MmfastError, match="leave memory= out"):
        pipe.restore(tmp_path, memory="window:10")


def test_watches_that_ended_are_freed_and_their_figures_stay() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    with pipe.open(MEMORY) as session:
        held = []
        for n in range(4):
            source = iter(
                [(f, n * 10.0 + t) for f, t in zip(this.clip(2), (0.0, 0.0), strict=True)]
            )
            watch = session.watch(source, background=bool(n % 2))
            assert watch.join(60)
            held += [weakref.ref(watch), weakref.ref(watch.feed), weakref.ref(watch.live)]
        with pytest.raises(MediaError, match="cable pulled"):
            session.watch(source_that_dies(this.clip(2)))
        del watch
        gc.collect()
        assert not [each() for each in held if each() is not None]
        stats = session.stats()
        assert stats["source_events"]["repeated"] == 4 and len(stats["errors"]) == 1


def test_cancelled_subscriptions_are_freed() -> None:
    with shared_pipe(FAMILY).open(MEMORY) as session:
        kept = session.subscribe("a", yes=["y"], no=["n"])
        gone = session.subscribe("b", yes=["y"], no=["n"])
        held = weakref.ref(gone)
        gone.cancel()
        gone.cancel()
        del gone
        gc.collect()
        assert held() is None and session.subscriptions == [kept]
