"""Waiting for a condition, figures of subscriptions, and frames that a question reads again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from stream_tools import seconds, shared_pipe, watcher

from mmfast.core.errors import MediaError, MmfastError
from mmfast.frontends.live import inputs
from mmfast.frontends.live.source import live_frames

FAMILY = "llava_onevision"
ALWAYS = {"threshold": 1e-9, "release": 0.0}
WORDS: dict[str, Any] = {"yes": ["y"], "no": ["n"]}


def test_it_returns_the_event_and_stops_looking() -> None:
    this = watcher(FAMILY)
    with shared_pipe(FAMILY).open() as session:
        pushing = threading.Timer(0.2, session.push, (this.clip(2), seconds(2)))
        pushing.start()
        event = session.wait_until("a car stops", timeout=30, **WORDS, **ALWAYS)
        pushing.join()
        assert event is not None and event.condition == "a car stops" and event.time == 0.5
        assert not session.subscriptions and session.stats()["subscriptions"] == []


def test_a_question_is_put_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    this = watcher(FAMILY)
    with shared_pipe(FAMILY).open() as session:
        asked: list[str] = []
        branch = session.stream.branch
        monkeypatch.setattr(
            session.stream, "branch", lambda text, *more: asked.append(text) or branch(text, *more)
        )
        for text in ("Is the door open?", "tell me when the door opens"):
            pushing = threading.Timer(0.2, session.push, (this.clip(1)[0],))
            pushing.start()
            session.wait_until(text, timeout=30, **WORDS, **ALWAYS)
            pushing.join()
        assert asked[0] == "Is the door open?"
        assert asked[1] == "Is this happening now: the door opens? Answer yes or no."


def test_it_gives_up_in_time_and_when_all_sources_have_ended() -> None:
    this = watcher(FAMILY)
    never = {"threshold": 1.0, "release": 0.0}
    with shared_pipe(FAMILY).open() as session:
        start = time.monotonic()
        assert session.wait_until("a", timeout=0.3, **WORDS, **never) is None
        assert 0.25 < time.monotonic() - start < 20
        with pytest.raises(MmfastError, match="nothing is being watched"):
            session.wait_until("a", **WORDS)
        with pytest.raises(MmfastError, match="callback 3 cannot be called"):
            session.subscribe("a car stops", 3)  # type: ignore[arg-type]
        with pytest.raises(MmfastError, match="timeout=-1"):
            session.wait_until("a", timeout=-1)

        def slowly() -> Iterator[Any]:
            for frame in this.clip(3):
                time.sleep(0.1)
                yield frame

        session.watch(slowly(), background=True)
        assert session.wait_until("a", **WORDS, **never) is None  # without a time limit
        assert session.stats()["frames"] > 0


def test_figures_of_subscriptions_say_since_when_it_is_true() -> None:
    this = watcher(FAMILY)
    with shared_pipe(FAMILY).open() as session:
        true = session.subscribe("a", every=0.0, pause=0.0, **WORDS, **ALWAYS)
        false = session.subscribe("b", every=1.0, **WORDS, threshold=1.0, release=0.0)
        session.push(this.clip(6), seconds(6))
        for i, frame in enumerate(this.clip(4)):
            session.push(frame, 10.0 + i / 2)
        one, two = session.stats()["subscriptions"]
        assert (one["condition"], one["asked"], one["answered"]) == ("a", 5, 1)
        assert one["true_since"] == true.since == 2.5 and one["error"] is None
        assert (two["condition"], two["answered"], two["true_since"]) == ("b", 0, None)
        assert two["asked"] == false.asked == 3  # a second apart
        true.rule = false.rule
        session.push(this.clip(1)[0], 20.0)
        assert session.stats()["subscriptions"][0]["true_since"] is None


def test_a_reply_lists_the_frames_that_it_read_again() -> None:
    this = watcher(FAMILY)
    with shared_pipe(FAMILY).open("sink:8+window:64+retrieve:2") as session:
        session.push(this.clip(2), seconds(2))
        assert session.ask("what?", max_new_tokens=1).recalled == []  # all is live
        session.push(this.clip(14), seconds(14, start=5.0))
        reply = session.ask("what?", max_new_tokens=2)
        branch = reply.branch
        times = {p.number: p.time for n in (1,) for p in _stored(session)}
        layers = [number for numbers in branch.found.values() for number in numbers]
        assert {(f.number, f.time, f.layers) for f in reply.recalled} == {
            (n, times[n], layers.count(n)) for n in set(layers) if times[n] is not None
        }
        assert 2 <= len(reply.recalled) <= 2 * len(branch.found)
        reply.read()
        assert reply.branch is None and reply.recalled  # kept when the answer has ended


def _stored(session: Any) -> list[Any]:
    archive = session.stream.memory.archive
    found = archive.read(0, [_whole(number) for number in archive.numbers()])
    return list(found)


def _whole(number: int) -> Any:
    from mmfast.streams.archive.archive import Found

    return Found(number, None)


def test_a_screen_is_a_source_beside_cameras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setattr("mmfast.frontends.live.inputs.sys.platform", "linux")
    with pytest.raises(MediaError, match="needs a display") as refused:
        live_frames("screen")
    assert "\n" not in str(refused.value)
    assert inputs.screen_address(":7", "linux") == ("x11grab", ":7")
    assert inputs.screen_address("", "win32") == ("gdigrab", "desktop")
    assert inputs.screen_address("", "darwin")[0] == "avfoundation"
    with pytest.raises(MediaError, match="cannot be opened"):
        live_frames("screen::93")


def test_pictures_of_the_screen_come_at_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image, ImageGrab

    shots = iter(range(100))  # begun anew below
    grab = lambda: Image.fromarray(np.full((48, 64, 3), next(shots), np.uint8))
    monkeypatch.setattr(ImageGrab, "grab", grab)
    monkeypatch.setattr(inputs.av, "formats_available", set())
    pictures = inputs.screen_pictures(20)
    found = [(int(np.asarray(shot)[0, 0, 0]), at) for shot, at in islice(pictures, 3)]
    assert [number for number, _ in found] == [0, 1, 2]
    assert all(number / 20 - 1e-3 <= at for number, at in found)  # never sooner
    shots = iter(range(100))
    source = live_frames("screen::0", fps=20)
    found = [(int(frame[0, 0, 0]), at) for frame, at in islice(source, 3)]
    source.close()
    numbers = [number for number, _ in found]
    assert numbers == sorted({*numbers})  # who reads too late gets the newest
    assert all(number / 20 - 1e-3 <= at for number, at in found) and found[-1][1] < 10


def test_a_screen_that_may_not_be_recorded_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageGrab

    def refuse() -> None:
        raise OSError("no right to do so")

    monkeypatch.setattr(ImageGrab, "grab", refuse)
    with pytest.raises(MediaError, match="no right to do so"):
        next(inputs.screen_pictures(5))
