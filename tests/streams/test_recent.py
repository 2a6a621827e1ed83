"""Questions about motion: a stream of the embedded model answers them from its last frames."""

from __future__ import annotations

from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mmfast
from mmfast.core.trace import Trace
from mmfast.frontends.video.reader import read_video
from mmfast.streams.recent import APART, CLIP, GAP, MOST, SIDE, STEP, RecentFrames
from mmfast.tiny.scenes.evaluate import scene_cases
from mmfast.tiny.scenes.questions import ATTRIBUTE, OUTSIDE, PART, WHICH
from mmfast.tiny.suites import SuiteCase, suite
from mmfast.tiny.video import scene

MOTION = ("direction", "speed", "first")


@cache
def streams() -> Any:
    return mmfast.pipeline("video-stream", device="cpu")


@cache
def clips() -> Any:
    return mmfast.pipeline("video-qa", device="cpu")


def picture(value: int, side: int = 24) -> Any:
    return np.full((side, side, 3), value, np.uint8)


@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=80))
def test_few_frames_are_kept_in_order_and_the_last_always_fits(steps: list[float]) -> None:
    recent, now, kept = RecentFrames(), 0.0, list[float]()
    for step in steps:
        now += step
        recent.add(picture(100), now)
        if not kept or now >= kept[-1] + GAP - 1e-3:
            kept.append(now)
    frames, times = recent.clip()
    assert len(frames) == len(times) <= CLIP
    assert times[-1] == kept[-1] and times == sorted(set(times)) and set(times) <= set(kept)
    assert recent.whole == (len(kept) <= MOST)
    if not recent.whole:  # the end of an endless stream, never a thinned hour
        assert all(after - before >= STEP - 0.01 for before, after in pairwise(times))
        assert max([b - a for a, b in pairwise(times)], default=0) < STEP + 3.0
    elif len(kept) > CLIP:
        assert times[0] == kept[0] and len(times) == CLIP


def test_a_cut_a_gap_and_another_size_begin_anew() -> None:
    for frame, time in ((picture(160), 1.0), (picture(100), 1.0 + APART), (picture(100, 32), 1.0)):
        recent = RecentFrames()
        recent.add(picture(100), 0.0)
        recent.add(picture(101), 0.5)
        assert recent.clip()[1] == [0.0, 0.5]
        recent.add(frame, time)
        assert recent.clip()[1] == [time] and not recent.whole


def test_large_frames_are_kept_small() -> None:
    recent = RecentFrames()
    recent.add(np.zeros((1080, 1920, 3), np.uint8), 0.0)
    assert max(recent.clip()[0][0].shape) == SIDE


def test_a_clip_is_no_cut_and_the_next_clip_is_one() -> None:
    shown = [list(read_video(case.media[0], frames=8).frames) for case in suite(24, 5)]
    for before, after in pairwise(shown):
        recent = RecentFrames()
        for number, frame in enumerate([*before, *after]):
            recent.add(frame, number * GAP)
        frames, _ = recent.clip()
        assert len(frames) == 8 and (frames[0] == after[0]).all()


def test_words_that_a_stream_has_not_read_are_for_the_model_of_clips() -> None:
    """A description, another wording, and a question that only the larger model refuses."""
    case = clip_of("direction")
    with streams().open() as session:
        for frame in read_video(case.media[0], frames=8).frames:
            session.push(frame)
        for question, begin in (
            ("Describe the clip.", "there "),
            ("Who is the king?", "I only know"),
        ):
            reply = session.ask(question)
            assert reply.read().startswith(begin) and reply.trace.rows[0].stage == "clip"
        known = session.ask("What number is shown?")
        assert known.read() and known.trace.rows[0].stage == "question"


def test_the_past_alone_stays_with_the_model_of_the_stream() -> None:
    recent = RecentFrames()
    for number in range(4):
        recent.add(picture(100), number * GAP)
    asked = [
        "Which way does the red circle move?",
        "In which direction does the star move?",
        "Where is the red circle going?",
        "Which is faster, the star or the circle?",
        "Which appears first, the star or the circle?",
        "Where is the red circle at the end?",
        "What colour is the circle now?",
        "How many objects are there?",
        "What color is the object?",
        "What shape is it?",
        "What is the colour of the shape?",
        "Which shape do you see?",
        "Is there a red circle?",
    ]
    assert all(recent.asked(question) for question in asked)
    others = [
        "What number is at the red circle?",
        "In which corner is the red circle?",
        "Where is the red circle?",
        "What is the shape of the red object?",
        "What shape is the white object?",
    ]
    assert not any(recent.asked(question) for question in others)
    recent.cut()
    assert not any(recent.asked(question) for question in asked)  # nothing is there
    recent.add(picture(100), 9.0)
    assert not recent.asked(asked[0]) and recent.asked(asked[-1])  # a picture has no motion


def test_a_clip_is_of_now_and_a_place_now_is_that_at_its_end() -> None:
    recent = RecentFrames()
    assert recent.worded("Where is the star right now?") == "Where is the star at the end?"
    for asked, said in (
        ("Where is the star heading now?", "Where is the star heading?"),
        ("How many objects are there right now?", "How many objects are there?"),
        ("Now, is there a red circle?", "is there a red circle?"),
        ("What do you know of it?", "What do you know of it?"),
    ):
        assert recent.worded(asked) == said


def clip_of(kind: str, seed: int = 7) -> SuiteCase:
    return next(case for case in suite(8, seed) if case.kind == kind)


def test_a_stream_tells_what_the_clip_tells_and_forgets_the_question(tmp_path: Path) -> None:
    case, model = clip_of("direction"), streams().stream_model
    frames = list(read_video(case.media[0], frames=8).frames)
    with streams().open() as session:
        for frame in frames:
            session.push(frame)
        before = session.stats()["memory"]
        reply = session.ask(case.question)
        assert reply.read() == clips()(frames, case.question).text.strip()
        assert [row.stage for row in reply.trace.rows] == ["clip", "question", "generate"]
        assert session.stats()["memory"] == before
        session.save(tmp_path)
        with streams().restore(tmp_path) as again:
            same = again.ask(case.question)
            assert same.read() and same.ids == reply.ids
        # an exchange that is kept is written into the stream of the other model
        kept = session.ask(case.question, remember=True)
        assert kept.read() and session.stats()["memory"]["live_tokens"] > before["live_tokens"]
        # planted fault: the model of the stream alone
        assert session.stream.answering(case.question, Trace())[0].model is not model
        session.stream.recent = None
        assert session.stream.answering(case.question, Trace())[0].model is model


@pytest.mark.slow
def test_motion_in_streams_is_as_right_as_in_clips(tmp_path: Path) -> None:
    """Nine tenths of what `ask` answers right, frame by frame and from a file at one a second.

    Which came first is, behind other files, a question about the history of all of them.
    """
    cases = [case for case in suite(48, 0) if case.kind in MOTION]
    right, behind = dict.fromkeys(("ask", "push", "watch", "playlist"), 0), 0
    file = tmp_path / "clip.mp4"
    with streams().open() as playlist:
        for case in cases:
            file.write_bytes(case.media[0])
            if clips()(file, case.question).text.strip() != case.answer:
                continue
            right["ask"] += 1
            with streams().open() as session:
                for frame in read_video(case.media[0], frames=scene.SAMPLED).frames:
                    session.push(frame)
                right["push"] += session.ask(case.question).read() == case.answer
            with streams().open() as session:
                session.watch(file)
                right["watch"] += session.ask(case.question).read() == case.answer
            playlist.watch(file)  # behind all others
            reply = playlist.ask(case.question)
            said, rows = reply.read(), {row.stage for row in reply.trace.rows}
            if "look" in rows:  # from the history, which says when each was there, in any file
                assert case.kind == "first"
            else:
                behind += 1
                right["playlist"] += said == case.answer
    assert right["ask"] >= 0.9 * len(cases) and right.pop("playlist") >= 0.9 * behind > 0
    assert min(right.values()) >= 0.9 * right["ask"], right


def _told(asked: Any, known: bool, recent: RecentFrames, text: str, strange: bool = False) -> Any:
    return known and asked(recent, text, strange)


@pytest.mark.slow
def test_streams_know_the_wordings_of_the_larger_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most answers are right, and few of those where the model of the stream is asked (a fault)."""
    kinds = ("colour", "count", "position", "exists", "background", "number", "shape", OUTSIDE)
    kinds += (ATTRIBUTE, PART, WHICH)
    cases = [c for c in islice(scene_cases(32, kinds, stills=False), 66) if len(c.turns) == 1]
    asked, right = RecentFrames.asked, {True: 0, False: 0}
    for case in cases:
        with streams().open() as session:
            for frame in case.shot().pixels:
                session.push(frame)
            for known in right:
                told = partial(_told, asked, known)
                monkeypatch.setattr(RecentFrames, "asked", lambda *args, told=told: told(*args))
                said = session.ask(case.turns[0]).read()
                right[known] += said.strip().lower() == case.answer.lower()
    assert right[True] > 0.75 * len(cases) and right[False] < 0.4 * len(cases), right
