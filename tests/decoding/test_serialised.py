"""Two texts in one stream: parted again word by word, no translation before what it needs."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmfast.core.errors import SpecError
from mmfast.decoding.serialised import (
    CHANGE,
    HEARD,
    SAID,
    ChannelSplitter,
    Demultiplexer,
    TimedWord,
    align_streams,
    serialise,
    serialise_channels,
    split_channels,
)

CASES = st.integers(0, 8).flatmap(
    lambda many: st.tuples(st.just(many), st.lists(st.integers(0, many + 1), max_size=8))
)


@given(CASES)
def test_a_stream_is_parted_into_its_texts(case: tuple[int, list[int]]) -> None:
    """Every word arrives once, in order, and a translation after the words that it needs."""
    many, needs = case
    source, target = [f"s{i}" for i in range(many)], [f"t{i}" for i in range(len(needs))]
    stream, heard = align_streams(source, target, needs), 0
    parts = Demultiplexer()
    for place, word in enumerate(stream):
        mark = parts.push(word, float(place))
        if word in (HEARD, SAID):
            assert mark is None and (not place or stream[place - 1] not in (HEARD, SAID))
        elif mark == HEARD:
            assert word == f"s{heard}"
            heard += 1
        else:
            assert heard >= min(many, max(needs[: int(word[1:]) + 1]))
    assert parts.text(HEARD).split() == source and parts.text(SAID).split() == target
    for mark, words in ((HEARD, source), (SAID, target)):
        assert [stream[int(word.at)] for word in parts.texts[mark]] == words
        times = [word.at for word in parts.texts[mark]]
        assert times == sorted(times)


def test_words_come_as_soon_as_those_they_need() -> None:
    stream = align_streams(
        ["the", "red", "circle", "moves", "left"], ["ronda", "ruva", "levo", "mira"], [3, 3, 5, 5]
    )
    wanted = "<heard> the red circle <said> ronda ruva <heard> moves left <said> levo mira"
    assert " ".join(stream) == wanted
    assert serialise([(HEARD, ["a"]), (SAID, []), (HEARD, ["b"])]) == [HEARD, "a", HEARD, "b"]
    assert Demultiplexer().push("word", 0.0) == HEARD
    with pytest.raises(SpecError, match="1 alignments for 2 words"):
        align_streams(["a"], ["b", "c"], [1])


def test_other_marks_are_other_speakers() -> None:
    """Marks of speakers part overlapping words as those of tasks do."""
    parts = Demultiplexer(("<one>", "<two>"))
    stream = "<one> hello <two> hi <one> anna <two> there ben"
    for at, word in enumerate(stream.split()):
        parts.push(word, at / 2)
    assert (parts.text("<one>"), parts.text("<two>")) == ("hello anna", "hi there ben")
    assert [word.at for word in parts.texts["<two>"]] == [1.5, 3.5, 4.0]


ENDS = st.lists(st.integers(0, 12), max_size=7).map(sorted)  # many words end together


@given(ENDS, ENDS)
def test_two_overlapping_speakers_make_a_round_trip(one: list[int], two: list[int]) -> None:
    """Any overlap, ties and silence of one of them included; marks stand only between two."""
    wanted = tuple(
        [TimedWord(f"{name}{i}", at / 4) for i, at in enumerate(ends)]
        for name, ends in (("a", one), ("b", two))
    )
    stream = serialise_channels(wanted)
    assert split_channels(stream) == wanted
    assert [word.at for word in stream] == sorted(word.at for word in stream)
    texts = [word.text for word in stream]
    names = ["a", *(text[0] for text in texts if text != CHANGE)]  # who spoke before each word
    changes = sum(before != after for before, after in pairwise(names))
    assert texts.count(CHANGE) == changes and texts[-1:] != [CHANGE]
    splitter = ChannelSplitter()
    for place, word in enumerate(stream):
        number = splitter.push(word)
        assert number is None if word.text == CHANGE else word in wanted[number or 0]
        parts = split_channels(stream[: place + 1])
        assert parts == splitter.channels  # a beginning of the stream is parted as the whole is


def test_what_two_channels_cannot_carry_is_refused() -> None:
    word = TimedWord("a", 1.0)
    with pytest.raises(SpecError, match="3 channels; a mark of change tells 2 apart"):
        serialise_channels([[word], [word], [word]])
    with pytest.raises(SpecError, match="out of order"):
        serialise_channels([[word, TimedWord("b", 0.5)]])
    with pytest.raises(SpecError, match="a word is '<change>'"):
        serialise_channels([[TimedWord(CHANGE, 0.0)]])
    assert serialise_channels([[word]]) == [word] and serialise_channels([]) == []
    assert [w.text for w in serialise_channels([[], [word]])] == [CHANGE, "a"]
