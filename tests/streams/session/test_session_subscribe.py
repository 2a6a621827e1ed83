"""Proactive answers: the rule by itself, and on streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from stream_tools import answer_logits, seconds, shared_pipe, watcher

from mmfast.core.errors import MmfastError
from mmfast.streams.reply import Sampler
from mmfast.streams.subscription import Event, Look, Ready, SpeakRule, condition_of

FAMILY = "llava_onevision"


def told(rule: SpeakRule, course: list[tuple[float, float]]) -> list[float]:
    """Times at which a rule speaks, for (time, probability) pairs."""
    ready, found = Ready(), []
    for time, probability in course:
        if ready.due(rule, time):
            ready, speak = ready.step(rule, time, probability)
            found += [time] if speak else []
    return found


def test_it_speaks_once_per_rise() -> None:
    rule = SpeakRule(threshold=0.6, release=0.4, every=0, pause=0)
    rise = [(0, 0.1), (1, 0.7), (2, 0.9), (3, 0.5), (4, 0.8), (5, 0.4), (6, 0.6), (7, 0.0)]
    assert told(rule, rise) == [1, 6]  # at 4 it has trembled, and not fallen to the release
    assert told(rule, [(0, 0.9), (1, 0.9)]) == [0]  # true from the beginning is told, too
    assert told(rule, [(0, 0.59), (1, 0.5)]) == []


def test_it_rests_and_does_not_look_all_the_time() -> None:
    course = [(float(t), 0.9 if t % 2 else 0.1) for t in range(12)]
    assert told(SpeakRule(every=0, pause=0), course) == [1, 3, 5, 7, 9, 11]
    assert told(SpeakRule(every=0, pause=5), course) == [
        1,
        7,
    ]  # what rose while it rested still rings
    assert told(SpeakRule(every=3, pause=0), course) == [3, 9]


@pytest.mark.parametrize(
    "knobs",
    [
        {"threshold": 0.0},
        {"threshold": 1.2},
        {"threshold": 0.5, "release": 0.6},
        {"every": -1.0},
        {"pause": -1.0},
        {"loudness": 3.0},
        {"every": "x"},
        {"threshold": "0.5"},
        {"release": None},
    ],
)
def test_knobs_out_of_range(knobs: dict[str, float]) -> None:
    ((name, _),) = list(knobs.items())[-1:]
    with pytest.raises(MmfastError, match=name):
        SpeakRule.of(knobs)


def test_a_rule_releases_at_two_thirds_of_its_threshold() -> None:
    assert SpeakRule.of({"threshold": 0.9}) == SpeakRule(0.9, 0.9 * 2 / 3)
    assert SpeakRule.of({"threshold": 0.9, "release": 0.2}) == SpeakRule(0.9, 0.2)


def test_conditions() -> None:
    assert condition_of("Tell me when a car stops.") == "a car stops"
    assert condition_of("please alert me if it rains") == "it rains"
    assert condition_of("a door opens") == "a door opens"
    with pytest.raises(MmfastError):
        condition_of("  ")


def chances(session: Any, words: list[str]) -> list[float]:
    """Probabilities of the first tokens of words where the probe's answer begins."""
    logits = answer_logits(session, "Is it a? Answer yes or no.")
    shares = Sampler(session.model.blocked).allowed(logits).softmax(-1)
    first = [session.model.script.wording.text(word)[0] for word in words]
    return [float(shares[token]) for token in first]


def test_the_probability_is_that_of_the_answer() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    with pipe.open() as session:
        session.push(this.clip(2), seconds(2))
        yes, no, other = chances(session, ["y", "n", "q"])
        logits = answer_logits(session, "Is it a? Answer yes or no.")
        look = Look("?", ("y",), ("n",))
        assert look.probability(session.model, logits) == pytest.approx(yes / (yes + no))
        look = Look("?", ("y", "q"), None)
        assert look.probability(session.model, logits) == pytest.approx(yes + other)
        look = Look("?", silence="q")
        assert look.probability(session.model, logits) == pytest.approx(1 - other)


@pytest.mark.parametrize("callback", [True, False])
def test_events_of_a_stream(callback: bool) -> None:
    """Events come where the probability rises, with the answer to a question about them."""
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    clip = this.clip(10)
    course = []
    with pipe.open() as session:
        for i, frame in enumerate(clip):
            session.push(frame, i / 2)
            yes, no = chances(session, ["y", "n"])
            course.append((i / 2, yes / (yes + no)))
        silent = answer_logits(session, "what?")
    values = sorted(p for _, p in course)
    rule = SpeakRule(threshold=values[6], release=values[3], every=0.5, pause=1.0)
    wanted = told(rule, course)
    assert 0 < len(wanted) < 10
    events: list[Event] = []
    with pipe.open() as session:
        subscription = session.subscribe(
            "tell me when a",
            events.append if callback else None,
            probe="Is it {condition}? Answer yes or no.",
            yes=["y"],
            no=["n"],
            reply="what is it?",
            max_new_tokens=3,
            threshold=rule.threshold,
            release=rule.release,
            every=0.5,
            pause=1.0,
        )
        for i, frame in enumerate(clip):
            session.push(frame, i / 2)
        events += subscription.waiting()
        assert [event.time for event in events] == wanted
        assert all(event.condition == "a" and event.text for event in events)
        assert session.stats()["events"] == len(wanted)
        assert torch.equal(answer_logits(session, "what?"), silent)  # nothing stays in the stream


def test_a_reader_in_another_thread_ends_with_the_session() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    session = pipe.open()
    always = {"threshold": 1e-9, "release": 1e-9, "every": 0.0, "pause": 0.0}
    subscription = session.subscribe("a", yes=["y"], no=["n"], **always)
    found: list[Event] = []
    reader = threading.Thread(target=lambda: found.extend(subscription))
    reader.start()
    session.push(this.clip(1)[0], 0.0)
    session.close()
    reader.join(20)
    assert not reader.is_alive() and len(found) == 1 and not list(subscription)


def test_a_callback_that_fails_does_not_end_the_stream() -> None:
    this, pipe = watcher(FAMILY), shared_pipe(FAMILY)
    with pipe.open() as session:

        def fails(event: Event) -> None:
            raise RuntimeError("mine")

        subscription = session.subscribe("a", fails, yes=["y"], no=["n"], threshold=1e-9, release=0)
        assert session.push(this.clip(1)[0], 0.0) == 1
        assert isinstance(subscription.error, RuntimeError)
        subscription.cancel()
        assert session.push(this.clip(1)[0], 5.0) == 1 and subscription.events == 1


def test_words_that_cannot_be_told_apart() -> None:
    with shared_pipe(FAMILY).open() as session:
        with pytest.raises(MmfastError, match="same token"):
            session.subscribe("a", yes=["no way"], no=["no"])
        with pytest.raises(MmfastError, match="no token"):
            session.subscribe("a", yes=[""])
        assert not session.subscriptions
