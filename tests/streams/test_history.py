"""Questions about hours: order, count, duration and time of what a stream has shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmfast
from mmfast.core.errors import MmfastError
from mmfast.core.trace import Trace
from mmfast.streams.history import BEST, HistoryQuestion, HistorySearch, Span, clock, singular, tell
from mmfast.streams.moments import PICTURES, MomentAlbum, StreamMoment
from mmfast.streams.recent import APART
from mmfast.tiny.stream.history import KINDS, cases_of, run_history, showings
from mmfast.tiny.stream.world import World

MEMORY = "sink:64+window:576+retrieve:16"


@pytest.mark.parametrize(
    ("text", "kind", "things", "last"),
    [
        ("Which came first, the red circle or the blue square?", "order", 2, False),
        ("Which was shown last: a red circle or a blue square?", "order", 2, True),
        ("How many numbers have been shown?", "count", 1, False),
        ("How often was the red circle shown?", "count", 1, False),
        ("How long has the red circle been on the screen so far?", "duration", 1, False),
        ("At which second was the red circle shown?", "when", 1, False),
        ("When did the red circle appear?", "when", 1, False),
        ("Has there been a red circle?", "ever", 1, False),
    ],
)
def test_a_question_is_read_by_its_form(text: str, kind: str, things: int, last: bool) -> None:
    found = HistoryQuestion.of(text)
    assert found is not None and (found.kind, found.last) == (kind, last)
    assert len(found.things) == things and found.things[0] in ("red circle", "number")


def test_questions_of_no_form_are_refused() -> None:
    for text in (
        "How many objects are there?",
        "How many objects were shown?",
        "Which moves faster, the red circle or the star?",
        "What number is at the red circle?",
        "When was the number shown?",
        "When does the red circle appear?",
    ):
        assert HistoryQuestion.of(text) is None
    assert [singular(many) for many in ("red crosses", "cars", "glass")] == [
        "red cross",
        "car",
        "glass",
    ]
    assert [clock(seconds) for seconds in (9.5, 754, 3723)] == ["0:09", "12:34", "1:02:03"]


class Watched:
    """Moments of eight seconds, and what each of them shows."""

    def __init__(self, shown: dict[str, set[int]], count: int, cuts: Sequence[bool]) -> None:
        self.shown = shown
        self.moments = [
            StreamMoment([8.0 * i + j for j in range(8)], [b""] * 8, cuts[i], 8.0 * (i + 1))
            for i in range(count)
        ]
        self.asked: list[tuple[int, str]] = []

    def search(self, recalled: dict[str, dict[float, int]] | None) -> HistorySearch:
        for moment in self.moments:
            moment.shot = lambda most=8, at=moment.start: ([at], [])  # type: ignore[misc]
        return HistorySearch(self.moments, recalled, [], self.clip, self.yes, self.read)

    def clip(self, pictures: list[Any], times: list[float]) -> int:
        return int(pictures[0]) // 8

    def yes(self, clip: int, thing: str) -> float:
        self.asked.append((clip, thing))
        return float(clip in self.shown[thing])

    def read(self, clip: int, question: str) -> str:
        return str(clip % 3)


def told(text: str, search: HistorySearch) -> Any:
    question = HistoryQuestion.of(text)
    assert question is not None
    return tell(question, search, True, Trace())


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_times_are_those_of_the_moments_that_show_a_thing(shown: list[bool]) -> None:
    there = {i for i, shows in enumerate(shown) if shows}
    watched = Watched({"car": there}, len(shown), [True] * len(shown))
    runs = [[i for i, _ in run] for key, run in groupby(enumerate(shown), lambda x: x[1]) if key]
    found = told("How many times was the car shown?", watched.search(None))
    assert found.value == len(runs) and found.looked == len(shown)
    assert found.spans["car"] == [Span(8.0 * run[0], 8.0 * run[-1] + 8) for run in runs]
    asked = len(watched.asked)
    found = told("How long was the car on the screen?", watched.search(None))
    assert found.value == (8 * len(there) if there else None)
    assert len(watched.asked) == asked  # what was found out is kept


def test_a_thing_is_hidden_for_a_moment_but_not_through_a_cut() -> None:
    for cut, count in ((False, 1), (True, 2)):
        watched = Watched({"car": {1, 3}}, 5, [True, False, cut, False, False])
        assert told("How many times was the car shown?", watched.search(None)).value == count


def test_retrieval_leads_to_a_few_moments_and_on_to_their_neighbours() -> None:
    watched = Watched({"car": {40, 41, 42}}, 100, [True] * 100)
    noise = {8.0 * i + 1: 1 for i in range(0, 100, 5)}
    found = told("When was the car shown?", watched.search({"car": {**noise, 330.0: 3}}))
    assert found.spans["car"] == [Span(320.0, 344.0)] and found.text == "5:20 to 5:44"
    assert found.found == BEST and found.looked <= BEST + 6
    # what most of the retrieved moments show may be anywhere: all are looked at
    watched = Watched({"car": set(range(0, 100, 2))}, 100, [True] * 100)
    found = told("How many times was the car shown?", watched.search({"car": {1.0: 1, 17.0: 1}}))
    assert found.value == 50 and found.looked == 100


def test_order_within_a_moment_is_asked_of_its_clip_and_what_was_not_shown_is_named() -> None:
    watched = Watched({"car": {2}, "bus": {2, 7}, "tram": set()}, 9, [True] * 9)
    search = watched.search(None)
    assert told("Which came first, the car or the bus?", search).value == str(2 % 3)
    assert told("Which came last, the car or the bus?", search).value == "bus"
    found = told("Which came first, the tram or the bus?", search)
    assert found.value is None and found.text == "the tram was not shown"
    watched.shown["number"] = {0, 1, 3, 4}
    found = told("How many numbers have been shown?", search)
    assert found.value == 2 and found.readings == ["0", "1"]


def test_the_album_keeps_to_its_bytes_and_is_saved_whole() -> None:
    rng, limit = np.random.default_rng(0), 40_000
    album = MomentAlbum(limit)
    for second in range(300):
        ground = np.full((32, 32, 3), 20 * (second // 20 % 10), np.uint8)
        album.add(ground + rng.integers(0, 4, ground.shape, dtype=np.uint8), float(second))
        assert album.stats()["bytes"] <= limit
    moments = album.moments()
    assert all(1 <= len(m.files) <= PICTURES for m in moments)
    assert not album.whole and moments[0].start > 0 and moments[-1].times[-1] == 299.0
    assert len(moments[0].files) < len(moments[-2].files)  # age takes details first
    again = MomentAlbum(limit)
    again.restore(album.snapshot())
    assert [(m.times, m.files, m.begins, m.end) for m in again.moments()] == [
        (m.times, m.files, m.begins, m.end) for m in moments
    ]


def test_a_cut_a_gap_and_eight_pictures_begin_a_moment() -> None:
    album, plain = MomentAlbum(None), np.full((24, 24, 3), 100, np.uint8)
    for second in range(10):
        album.add(plain, second + 0.0)
        album.add(plain, second + 0.5)  # too close
    album.add(plain + 60, 10.0)
    album.add(plain + 60, 11.0 + APART)
    moments = album.moments()
    assert [len(m.times) for m in moments] == [8, 2, 1, 1]
    assert [m.begins for m in moments] == [True, False, True, True]
    assert [m.end for m in moments] == [8.0, 10.0, 10.0, 15.0]
    pictures, times = moments[0].shot(3)
    assert times == [0.0, 4.0, 7.0] and np.abs(pictures[0].astype(int) - 100).max() < 3


@pytest.fixture(scope="module")
def pipe() -> Any:
    return mmfast.pipeline("video-stream", device="cpu")


def test_a_session_tells_when_and_how_long_and_refuses_the_rest(pipe: Any, tmp_path: Path) -> None:
    world = World(seed=91, every=12, facts=3)
    event = world.event(1)
    runs, numbers = showings(world, 34)
    with pipe.open(memory=MEMORY, history="1MB") as session:
        for frame, time in world.frames(seconds=34):
            session.push(frame, time)
        live = session.stats()["memory"]["live_tokens"]
        found = session.history(f"When was the {event.name} shown?")
        assert found.spans[event.name] == [Span(*map(float, runs[event.name][0]))]
        reply = session.ask(f"How long was the {event.name} on the screen?")
        length = runs[event.name][0][1] - runs[event.name][0][0]
        assert reply.read() == f"{length} seconds" and reply.finished == "stop"
        assert [row.stage for row in reply.trace.rows] == ["question", "look"]
        assert session.stats()["memory"]["live_tokens"] == live
        with pytest.raises(MmfastError, match="is no question about order"):
            session.history("What number is at the red circle?")
        session.save(tmp_path)
    with pipe.restore(tmp_path) as again:
        version = again.stream.version
        many = again.ask("How many numbers have been shown?", remember=True)
        assert many.read() == str(len(numbers)) and again.stream.version > version
    with pipe.open(memory=MEMORY, history=0) as session:
        session.push(world.frame(0), 0.0)
        with pytest.raises(MmfastError, match="keeps no history"):
            session.history(f"When was the {event.name} shown?")


def test_a_history_without_room_for_a_picture_says_so(pipe: Any) -> None:
    world = World(seed=91, every=12, facts=3)
    with pipe.open(memory=MEMORY, history=100) as session:
        with pytest.warns(UserWarning, match=r"a picture of \d+ bytes .* history of 100 bytes"):
            session.push(world.frame(0), 0.0)
        for second in range(1, 6):  # warned of once
            session.push(world.frame(second), float(second))
        assert session.stats()["history"] == {"moments": 0, "bytes": 0, "whole": False}
        with pytest.raises(MmfastError, match=r"nothing of the stream is in its history"):
            session.history("How many numbers have been shown?")


def test_a_session_saved_without_a_history_tells_from_where_on_it_has_one(
    pipe: Any, tmp_path: Path
) -> None:
    world, asked = World(seed=91, every=12, facts=3), "How many numbers have been shown?"
    with pipe.open(memory=MEMORY, history=0) as session:
        for second in range(4):
            session.push(world.frame(second), float(second))
        session.save(tmp_path)
    with pipe.restore(tmp_path, history="1MB") as again:
        with pytest.raises(MmfastError, match=r"nothing of the stream is in its history"):
            again.history(asked)
        for second in range(4, 8):
            again.push(world.frame(second), float(second))
        assert again.history(asked).since == 4.0


def test_truth_of_the_suite_counts_runs_of_seconds() -> None:
    world = World(seed=5, every=30, facts=4)
    runs, numbers = showings(world, 120)
    for name, spans in runs.items():
        seconds = [s for start, end in spans for s in range(start, end)]
        there = [
            second
            for second in range(120)
            if name in {f"{t.colour} {t.shape}" for t in world.place_at(second).things}
        ]
        assert seconds == there and all(a[1] < b[0] for a, b in pairwise(spans))
    assert {event.number for event in world.events(118)} <= set(numbers)
    asked = cases_of(world, 120)
    assert {case.kind for case in asked} == set(KINDS) and len({c.text for c in asked}) == len(
        asked
    )
    assert all(case.right(case.answer) for case in asked)
    assert not any(case.right(None) for case in asked)


@pytest.mark.slow
def test_history_is_mostly_right_and_the_model_alone_is_not() -> None:
    told_, alone = run_history(20, 77, 300.0)["rows"]
    assert told_["accuracy"] >= 0.85 and alone["accuracy"] <= 0.4
    assert told_["looked"] < 0.8 * told_["moments"]
