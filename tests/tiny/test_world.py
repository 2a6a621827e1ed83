"""The endless world: the same from a seed, any moment at once, facts that nothing else repeats."""

from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path

import av
import numpy as np
import pytest

from mmfast.core.errors import MmfastError
from mmfast.tiny.stream.world import (
    FACTS,
    KINDS,
    NAMES,
    World,
    main,
    past_questions,
    present_questions,
)
from mmfast.tiny.video.scene import COLOURS, EVAL, TRAIN, corner_of


def test_any_moment_is_the_same_however_one_comes_to_it() -> None:
    world, again = World(3, every=20), World(3, every=20)
    frames = [frame for frame, _ in world.frames(30, fps=2)]
    for time in (14.5, 0.0, 7.0, 29.5, 3600 * 5.0):
        alone = again.frame(time)
        assert alone.shape == (96, 96, 3) and alone.dtype == np.uint8
        if time < 30:
            assert np.array_equal(alone, frames[round(time * 2)])
    later = [time for _, time in world.frames(2, fps=4, start=100.0)]
    assert later == [100.0 + i / 4 for i in range(8)]
    others = (World(4, every=20), World(3, every=20, purpose=TRAIN))
    assert all(not np.array_equal(other.frame(0.0), frames[0]) for other in others)


@pytest.mark.parametrize("seed", range(8))
def test_names_of_facts_appear_at_no_other_moment(seed: int) -> None:
    """By an independent look at everything on screen, twice a second."""
    world = World(seed, every=12)
    names = [event.name for event in world.events()]
    numbers = [event.number for event in world.events()]
    assert len(names) == len(set(names)) == len(set(numbers)) == FACTS < len(NAMES)
    for step in range(2 * 12 * FACTS + 240):
        time = step / 2
        there = {thing.name for thing in world.place_at(time).things}
        for event in world.events():
            on = event.start <= time < event.stop
            assert (event.name in there) == on
            assert (world.event_at(time) == event) == on


def test_facts_last_seconds_and_scenes_10_to_60() -> None:
    world = World(5, every=200)
    for event in world.events():
        assert 4 <= event.stop - event.start <= 6
        thing, panel = event.place.things[0], event.place.panel
        assert panel is not None and panel.number == event.number
        half = np.array([16, 12])
        gap = np.abs(np.array(panel.corner) + half - np.array(thing.start)) - half
        assert gap.max() < thing.radius + 8  # beside it
        for time in (event.start, event.stop - 0.1):
            assert corner_of(world.at(time).centres[0]) == event.corner
            assert world.at(time).seen[0] == 1.0
    bare = World(5, facts=0)
    places = [bare.place_at(tenth / 10) for tenth in range(6000)]
    lengths = np.diff([i / 10 for i in range(6000) if i == 0 or places[i] != places[i - 1]])
    assert len(lengths) > 12 and lengths.min() >= 9.9 and lengths.max() <= 60.1


def test_things_move_and_stay_in_the_picture() -> None:
    world = World(6, facts=0)
    early, late = world.at(1.0), world.at(4.0)
    assert early.place == late.place
    moved = np.hypot(*(late.centres - early.centres).T)
    assert (moved > 2).all()
    for time in np.arange(0, 3600, 47.3):
        centres = world.at(float(time)).centres
        assert centres.min() > 8 and centres.max() < 88


def test_answers_are_what_the_pixels_show() -> None:
    """Colours of things asked about are in the picture, where the answer says they are."""
    asked = 0
    for seed in range(6):
        world = World(seed, every=12)
        for time in (5.0, 33.0, 95.0):
            moment = world.at(time)
            for question in present_questions(world, time):
                if question.kind != "position now":
                    continue
                colour = next(c for c in COLOURS if f" {c} " in question.text)
                if sum(thing.colour == colour for thing in moment.place.things) > 1:
                    continue
                near = np.abs(moment.frame.astype(int) - COLOURS[colour]).sum(-1) < 60
                panel = moment.place.panel
                if panel is not None:
                    left, top = panel.corner
                    near[top : top + 24, left : left + 32] = False
                y, x = np.argwhere(near).mean(0)
                assert corner_of((x, y)) == question.answer
                asked += 1
    assert asked >= 5


def test_past_questions_agree_with_the_table_of_events() -> None:
    world = World(9, every=15)
    time = 15.0 * 8
    table = {event.name: event for event in (world.event(i) for i in range(8))}
    found = past_questions(world, time)
    assert len(found) == 2 * len(table)
    texts = [question.text for question in found]
    assert len(set(texts)) == len(texts)
    for question in found:
        (event,) = [e for name, e in table.items() if f"the {name}?" in question.text]
        want = {"entry": str(event.number), "corner": event.corner}[question.kind]
        assert question.answer == want and question.kind in KINDS
        assert question.age == pytest.approx(time - event.stop)
    assert past_questions(world, world.event(0).start) == []
    assert [q.age for q in past_questions(world, world.event(0).start + 1)] == [0.0, 0.0]


def test_hours_take_no_memory() -> None:
    world = World(11)
    tracemalloc.start()
    for _ in world.frames(1500, fps=0.05):
        pass
    early, _ = tracemalloc.get_traced_memory()
    for _ in world.frames(9000, fps=0.05, start=20000):
        pass
    late, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert late < early + 1e6


def test_saved_as_a_file_it_is_the_same_video(tmp_path: Path) -> None:
    world = World(2, every=12, purpose=EVAL)
    world.save(tmp_path / "world.mp4", 20)
    with av.open(io.BytesIO((tmp_path / "world.mp4").read_bytes())) as box:
        read = [frame.to_ndarray(format="rgb24") for frame in box.decode(video=0)]
    assert len(read) == 20 and read[0].shape == (96, 96, 3)
    for frame, (drawn, _) in zip(read, world.frames(20), strict=True):
        assert np.abs(frame.astype(int) - drawn).mean() < 8


def test_the_file_comes_with_its_questions(tmp_path: Path) -> None:
    main([str(tmp_path / "w.mp4"), "--seconds", "60", "--every", "12", "--seed", "4"])
    asked = [json.loads(line) for line in (tmp_path / "w.jsonl").read_text().splitlines()]
    world = World(4, every=12)
    assert {q["answer"] for q in asked} >= {str(e.number) for e in world.events(59)}
    assert all(q["age"] >= 0 and q["asked"] == 59 for q in asked)
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "w.mp4"), "--every", "2"])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: World(facts=21), "facts=21"),
        (lambda: World(every=3), "every=3"),
        (lambda: World(every=float("inf")), "every=inf"),
        (lambda: World(every=float("nan")), "every=nan"),
        (lambda: World(facts=2).event(2), "fact 2 "),
        (lambda: World().frame(-5), "time=-5"),
        (lambda: World().frame("x"), "time='x'"),  # type: ignore[arg-type]
        (lambda: World("x"), "seed='x'"),  # type: ignore[arg-type]
    ],
)
def test_wrong_worlds_are_refused_in_one_line(make: object, match: str) -> None:
    with pytest.raises(MmfastError, match=match) as caught:
        make()  # type: ignore[operator]
    assert "\n" not in str(caught.value)
