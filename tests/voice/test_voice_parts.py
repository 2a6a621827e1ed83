"""Playback, words that were heard, history and figures, each against a plain account of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.core.errors import MmfastError
from mmfast.core.speech import Sound, Turn
from mmfast.streams.stream import FakeClock
from mmfast.voice.history import Alignment, History, HistoryTurn
from mmfast.voice.playback import Playback, ReplyMeter, Totals

RATE = 1000  # a sample is a millisecond
STEPS = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 60)), max_size=30)


def loudspeaker(steps: list[tuple[int, int]]) -> tuple[int, int, int]:
    """Played samples, gaps and silent milliseconds, one millisecond after another."""
    queue = played = gaps = silent = pending = 0
    for wait, samples in steps:
        for _ in range(wait):
            if queue:
                queue, played = queue - 1, played + 1
            elif played or queue:
                pending += 1
        if samples:
            if pending:
                gaps, silent, pending = gaps + 1, silent + pending, 0
            queue += samples
    return played, gaps, silent


@settings(max_examples=200)
@given(STEPS)
def test_playback_is_a_loudspeaker_that_plays_a_sample_a_tick(steps: list[tuple[int, int]]) -> None:
    clock = FakeClock()
    playback = Playback(clock, RATE)
    for wait, samples in steps:
        clock.advance(wait / RATE)
        playback.add(samples)
    played, gaps, silent = loudspeaker(steps)
    assert (playback.played(), playback.gaps) == (played, gaps)
    assert round(playback.silent * RATE) == silent


def test_a_playback_that_was_stopped_stays_where_it_is() -> None:
    clock = FakeClock()
    playback = Playback(clock, RATE, delay=0.01)
    playback.add(100)
    clock.advance(0.03)
    assert playback.stop() == 20  # ten milliseconds later than it came
    clock.advance(1.0)
    playback.add(100)
    assert (playback.played(), playback.arrived) == (20, 100)


def piece(text: str, loud: int, silent: int = 0, **notes: list[int]) -> Sound:
    return Sound(torch.cat([torch.ones(loud), torch.zeros(silent)]), RATE, text, notes=notes)


def heard_at(alignment: Alignment, *places: int) -> list[str]:
    return [alignment.heard(place) for place in places]


def test_a_word_is_heard_when_its_last_loud_sample_is() -> None:
    words = Alignment()
    for sound in (piece("the", 100, 50), piece(" red", 40), piece("", 60, 200), piece(" dot", 50)):
        words.add(sound)
    assert heard_at(words, 99, 100, 249, 250, 449, 500) == ["", "the", "the", *["the red"] * 3]
    words.finished = True
    assert heard_at(words, 499, 500, 10**6) == ["the red", "the red dot", "the red dot"]


def test_a_word_that_may_go_on_has_not_been_heard() -> None:
    words = Alignment()
    words.add(piece("one", 100))
    assert words.heard(100) == ""  # more of it may come
    words.add(piece("", 20))
    words.add(piece(" two", 10))
    assert heard_at(words, 119, 120, 130) == ["", "one", "one"]


def test_marks_belong_to_the_word_before_and_joined_pieces_are_the_text() -> None:
    words = Alignment()
    texts = ["yes", ",", " to", " the", " le", "ft", ".", "  "]
    for text in texts:
        words.add(piece(text, 100, 20))
    words.finished = True
    assert words.text == "".join(texts)
    assert heard_at(words, 219, 220, 10**6) == ["", "yes,", "yes, to the left."]


def test_places_within_a_piece() -> None:
    words = Alignment()
    words.add(piece("one two three", 300, starts=[0, 100, 250]))
    words.finished = True
    assert heard_at(words, 99, 100, 249, 250, 299, 300) == [
        *("", "one", "one", "one two", "one two", "one two three")
    ]


def test_text_without_places_is_shared_out_by_its_letters() -> None:
    words = Alignment()
    words.add(Sound(torch.zeros(0), RATE, "ab "))
    words.add(Sound(torch.zeros(0), RATE, "cdef"))
    words.add(piece("", 600))
    assert words.heard(139) == ""  # two letters at 70 ms
    assert words.heard(600) == "ab"
    words.finished = True
    assert heard_at(words, 199, 200, 599, 600) == ["", "ab", "ab", "ab cdef"]


def test_scripts_without_spaces_are_heard_sign_by_sign() -> None:
    words = Alignment()
    words.add(piece("左边", 200))
    words.finished = True
    assert heard_at(words, 99, 100, 200) == ["", "左", "左边"]


@settings(max_examples=200)
@given(st.data())
def test_what_was_heard_grows_and_is_a_prefix(data: st.DataObject) -> None:
    words, text = Alignment(), ""
    for _ in range(data.draw(st.integers(0, 8))):
        part = data.draw(st.text("ab, .", max_size=7))
        words.add(piece(part, data.draw(st.integers(0, 50)), data.draw(st.integers(0, 20))))
        text += part
    words.finished = data.draw(st.booleans())
    assert words.text == text
    heard = [words.heard(place) for place in range(0, words.samples + 10, 7)]
    assert all(text.startswith(part) for part in heard)
    assert all(len(a) <= len(b) for a, b in pairwise(heard))
    assert words.heard(0) == ""
    if words.finished and words.samples:
        assert words.heard(words.samples) == text.rstrip()


def test_history_forgets_the_oldest() -> None:
    history = History(turns=4, letters=20)
    for index in range(6):
        history.add(HistoryTurn(f"i{index}", "user", str(index)))
    assert [*history.items] == ["i2", "i3", "i4", "i5"]
    history.add(HistoryTurn("long", "assistant", "x" * 30))
    assert [*history.items] == ["i5", "long"]
    assert history.forgotten == 5
    assert history.turns() == (Turn("user", "5"), Turn("assistant", "x" * 30))
    again = History()
    again.restore(history.save())
    assert again.turns() == history.turns()
    with pytest.raises(MmfastError, match="choices: i5, long"):
        history.get("i2")
    for wrong in ([{"role": "user"}], [{"id": "a", "role": "cat", "text": ""}], [3]):
        with pytest.raises(MmfastError, match="save"):
            again.restore(wrong)  # type: ignore[arg-type]
    for bad in (0, -1, 1.5, True):
        with pytest.raises(MmfastError):
            History(turns=bad)  # type: ignore[arg-type]


def test_figures_of_a_reply() -> None:
    times = iter([0.0, 1.0, 1.5, 2.0, 3.0, 3.0, 3.5])
    meter = ReplyMeter(lambda: next(times))

    def sounds() -> Iterator[Sound]:
        yield Sound(torch.zeros(0), RATE, heard="hi")
        notes = {"drafted": [4, 2], "accepted": [3, 1]}
        yield Sound(torch.zeros(500), RATE, "a", passes=2, drafts=6, tokens=8, notes=notes)

    assert len(list(meter.timed(sounds()))) == 2
    stats = meter.stats()
    assert (stats["heard_ms"], stats["first_audio_ms"]) == (1500, 3000)
    assert stats["work_ms"] == 2000  # half a second, one, and half a one
    assert (stats["seconds"], stats["rtf"]) == (0.5, 4.0)
    assert (stats["tokens_per_pass"], stats["tokens_per_second"]) == (4.0, 4.0)
    assert (stats["acceptance"], stats["draft_passes"]) == ([0.75, 0.5], 6)
    totals = Totals()
    totals.add(meter)
    totals.add(meter)
    both = totals.stats()
    assert (both["seconds"], both["rtf"], both["acceptance"]) == (1.0, 4.0, [0.75, 0.5])
    assert (both["first_audio_ms_p50"], both["tokens"]) == (3000, 16)


def test_who_stops_listening_stops_the_model() -> None:
    closed = []

    def sounds() -> Iterator[Sound]:
        try:
            while True:
                yield Sound(torch.zeros(10), RATE)
        finally:
            closed.append(True)

    source = ReplyMeter().timed(sounds())
    next(source)
    source.close()  # type: ignore[attr-defined]
    assert closed
