"""Turns that end with a sentence: pauses inside one are waited for, a whole one is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.models.speech.turn_end import Overheard
from mmfast.voice.ear import (
    EAGERNESS,
    RATE,
    EarEvent,
    SemanticEar,
    VoiceEar,
    finished,
    overhear,
)

WHOLE = (
    "what colour is the circle",
    "Which way does the red circle move?",
    "where are they?",
    "the red circle moves to the left",
    "yes",
    "okay thanks",
    "stop",
    "no i meant the green one",
)
BROKEN = (
    "i would like",
    "I'd like",
    "i would like to know the",
    "what colour is",
    "which way does",
    "tell me the",
    "the circle and",
    "put it behind the",
    "i think, um",
    "what number is next to,",
    "we could...",
    "yes but",
    "how many are",
)
UNCLEAR = ("", "circle", "the circle", "where are you from", "tell me what it is", "yes it is")


def test_sentences_that_break_off_are_told_from_whole_ones() -> None:
    assert [finished(text) for text in WHOLE] == [True] * len(WHOLE)
    assert [finished(text) for text in BROKEN] == [False] * len(BROKEN)
    assert [finished(text) for text in UNCLEAR] == [None] * len(UNCLEAR)


@pytest.mark.parametrize("text", WHOLE)
def test_an_ear_that_has_guessed_the_end_is_not_believed(text: str) -> None:
    assert finished(text, 0.5) is False and finished(text, 0.9) is None


class Loud:
    """Takes for speech what is louder than silence."""

    def start(self) -> Any:
        return None

    def step(self, state: Any, window: Tensor) -> tuple[Any, Tensor]:
        return state, (window.abs().amax(-1, keepdim=True) > 0.01).float()


def sound(*seconds: float) -> Tensor:
    """Speech and silence in turn, of so many seconds."""
    parts = [torch.full((round(s * RATE),), 0.5 * (n % 2 == 0)) for n, s in enumerate(seconds)]
    return torch.cat(parts)


def heard(ear: Any, pcm: Tensor, size: int = 512) -> list[tuple[str, float, int]]:
    """Kind, second of detection and length in samples of the events of a sound in chunks."""
    found, at = [], 0
    for chunk in pcm.split(size):
        at += len(chunk)
        events = ear.hear(chunk)
        found += [(e.kind, at / RATE, 0 if e.pcm is None else len(e.pcm)) for e in events]
    return found


def ear_of(answers: list[tuple[str, float]], eagerness: str, asked: list[int]) -> SemanticEar:
    """An ear that hears these texts, one a pause."""

    def hears(pcm: Tensor) -> Overheard:
        asked.append(len(pcm))
        return Overheard(*answers[min(len(asked), len(answers)) - 1])

    return SemanticEar(eagerness, hears, activity=Loud())


@pytest.mark.parametrize("eagerness", EAGERNESS)
def test_a_pause_ends_a_turn_after_the_time_of_what_was_said(eagerness: str) -> None:
    """Whole, unclear, broken off: the silence that ends each is that of the eagerness."""
    texts = [("what colour is the circle", 1.0), ("circle", 1.0), ("what colour is", 1.0)]
    for text, wanted in zip(texts, EAGERNESS[eagerness], strict=True):
        events = heard(ear_of([text], eagerness, []), sound(1.0, 9.0))
        (_, started, _), (kind, stopped, length) = events
        assert kind == "stopped" and started < 0.1
        assert wanted / 1e3 <= stopped - 1.0 < wanted / 1e3 + 0.07
        assert abs(length / RATE - 1.1) < 0.07  # trailing silence is cut to the padding


def test_one_who_pauses_goes_on_in_the_same_turn() -> None:
    asked: list[int] = []
    texts = [("i would like", 1.0), ("i would like to know the colour", 1.0)]
    events = heard(ear_of(texts, "auto", asked), sound(1.0, 0.8, 1.0, 9.0))
    assert [kind for kind, _, _ in events] == ["started", "stopped"]
    assert abs(events[1][2] / RATE - 2.9) < 0.07  # with the pause in it
    assert abs(events[1][1] - 2.8 - 0.4) < 0.07
    assert len(asked) == 2 and asked[0] < 1.2 * RATE < asked[1]  # once a pause, of all so far
    cut = heard(VoiceEar(activity=Loud()), sound(1.0, 0.8, 1.0, 9.0))
    assert [kind for kind, _, _ in cut] == ["started", "stopped"] * 2


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 16000, 200_000])
def test_any_split_gives_the_same_turns(size: int) -> None:
    texts = [("what is", 1.0), ("what is the number", 1.0), ("the", 1.0), ("what now", 1.0)]
    pcm = sound(0.5, 0.7, 0.4, 2.5, 0.3, 5.0, 0.5, 1.5)
    if size == 1:
        pcm = pcm[: 2 * RATE]

    def turns(size: int) -> list[tuple[str, int, int]]:
        ear, found = ear_of(texts, "medium", []), list[EarEvent]()
        for chunk in pcm.split(size):
            found += ear.hear(chunk)
        found += ear.flush()
        return [(e.kind, e.at, 0 if e.pcm is None else len(e.pcm)) for e in found]

    assert turns(size) == turns(512) and len(turns(512)) >= 2


def test_without_an_ear_for_words_silence_alone_decides() -> None:
    for eagerness, (_, unclear, _) in EAGERNESS.items():
        ear = SemanticEar(eagerness, activity=Loud())
        stopped = heard(ear, sound(1.0, 5.0))[1]
        assert unclear / 1e3 <= stopped[1] - 1.0 < unclear / 1e3 + 0.07
    with pytest.raises(SpecError, match=r"eagerness 'hgih'.*high"):
        SemanticEar("hgih")


@pytest.mark.slow
def test_the_embedded_ear_waits_for_who_pauses_in_a_question() -> None:
    """Spoken by the embedded voice, with pauses of 0.8 s planted in it."""
    pytest.importorskip("silero_vad")
    from mmfast.models.speech.embedded import load_speech

    model = load_speech()

    def spoken(text: str) -> Tensor:
        return torch.cat([piece.pcm for piece in model.speak(text)])

    pause, rest = torch.zeros(round(0.8 * RATE)), torch.zeros(10 * RATE)
    broken = (
        ("i would like", "to know the colour"),
        ("which way does", "the red circle move"),
        ("what number is at", "the red circle"),
        ("what colour is the", "circle"),
    )
    for eagerness in ("low", "auto"):
        for first, second in broken:
            pcm = torch.cat([pause, spoken(first), pause, spoken(second), rest])
            make = SemanticEar(eagerness, partial(overhear, model))
            kinds = [kind for kind, _, _ in heard(make, pcm)]
            assert kinds == ["started", "stopped"], (eagerness, first)
            cut = [kind for kind, _, _ in heard(VoiceEar(), pcm)]
            assert cut == ["started", "stopped"] * 2, first  # what it is measured against
    for text in ("what colour is the circle", "which way does the red circle move"):
        said = spoken(text)
        for eagerness in ("low", "auto", "high"):
            pcm = torch.cat([pause, said, rest])
            found = heard(SemanticEar(eagerness, partial(overhear, model)), pcm)
            assert [kind for kind, _, _ in found] == ["started", "stopped"]
            delay = found[1][1] - 0.8 - len(said) / RATE
            assert delay < EAGERNESS[eagerness][0] / 1e3 + 0.1


def test_an_ear_that_guesses_an_end_is_less_sure_of_it() -> None:
    from mmfast.models.speech.embedded import load_speech
    from mmfast.tiny.speech.recordings import say

    model = load_speech()
    for text in ("what colour is the circle", "which way does the red circle move"):
        pcm = say(text).pcm
        found = model.overhear(pcm)
        assert found.text == model.transcribe(pcm) == text and found.sure > 0.95
    assert model.overhear(say("which way does").pcm).sure < 0.8
    assert model.overhear(torch.zeros(0)) == Overheard("")
