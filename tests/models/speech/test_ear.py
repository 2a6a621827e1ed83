"""What the embedded ear takes for speech, by frames whose words are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmfast.models.speech.ear import HELD, SpeechEar
from mmfast.models.speech.embedded import load_speech
from mmfast.models.speech.layout import SpeechGuide, SpeechLayout
from mmfast.models.speech.prefix_search import PrefixSearch


def ear_of(monkeypatch: pytest.MonkeyPatch, frames: list[tuple[str, float]]) -> SpeechEar:
    """An ear that hears one word a frame, each with a probability; the rest is no word."""
    ear = load_speech().ear
    chances = torch.zeros(len(frames), ear.layout.texts)
    for row, (word, chance) in zip(chances, frames, strict=True):
        row[ear.blank] = 1 - chance
        row[ear.layout.group(word)[0]] += chance
    monkeypatch.setattr(SpeechEar, "chances", lambda self, mel: chances)
    return ear


def first_alone(chances: Tensor) -> tuple[list[int], list[float]]:
    """A search that makes one sure word of everything."""
    word = int(chances[0, 1:].argmax()) + 1
    return [word], [float(chances[0, word])]


def test_words_that_leave_much_of_the_sound_out_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [("red", 0.9), ("circle", 0.9)]
    search: PrefixSearch = first_alone  # type: ignore[assignment]
    ear = ear_of(monkeypatch, pair)
    assert ear.layout.text(ear.hear(torch.zeros(100))[0]) == "red circle"
    assert ear.layout.text(ear.hear(torch.zeros(100), search)[0]) == "red"
    ear = ear_of(monkeypatch, [*pair, ("left", 0.9), ("right", 0.9)])
    assert HELD < 4 * 0.9
    assert ear.layout.text(ear.hear(torch.zeros(100))[0]) == "red circle left right"
    assert ear.hear(torch.zeros(100), search) == ([], [])


def test_words_in_doubt_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ear = ear_of(monkeypatch, [("red", 0.55), ("circle", 0.6)])
    assert ear.hear(torch.zeros(100)) == ([], [])
    ear = ear_of(monkeypatch, [("red", 0.55), ("circle", 0.7)])
    assert len(ear.hear(torch.zeros(100))[0]) == 2


def test_a_code_is_guessed_from_the_book_whose_turn_it_is() -> None:
    layout = SpeechLayout(("a", "b"), 2, 3, ("v",), (1,), (1,))  # rows 2, 3, then 4..6 and 7..9
    guesses = [
        [SpeechGuide.guesses(_guide(layout), token, place) for place in range(3)]
        for token in (layout.base + 1, layout.base + 4, layout.next)
    ]
    first, second, every = slice(2, 7), slice(7, 10), slice(2, 10)
    assert guesses == [[second, first, second], [first, second, first], [every] * 3]


def _guide(layout: SpeechLayout) -> SpeechGuide:
    guide = object.__new__(SpeechGuide)
    guide.layout, guide.draft_rows = layout, slice(layout.texts, layout.total)
    return guide
