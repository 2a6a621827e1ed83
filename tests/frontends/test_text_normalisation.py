"""Written text to what is said."""

import random
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.frontends.text_normalisation import MARKS, SpokenStream, spoken, unspoken

CASES = {
    "It's 3:15, isn't it?": "it is three fifteen , is not it ?",
    "Be there at 7:00!": "be there at seven o'clock .",
    "3:05 or 15:30": "five past three or fifteen thirty",
    "I can't see 42% of the 1,205 circles!": (
        "i can not see forty two percent of the one thousand two hundred and five circles ."
    ),
    "-5 + 3 = -2": "minus five plus three is minus two",
    "12 - 5": "twelve minus five",
    "3 x 4": "three times four",
    "8 / 2": "eight divided by two",
    "pages 10-20": "pages ten to twenty",
    "$3.50, €1 and £20": "three dollars and fifty cents , one euro and twenty pounds",
    "the 1st and the 22nd": "the first and the twenty second",
    "Color: red; favorite (gray)": "colour , red , favourite , grey ,",
    "forty-two": "forty two",
    "caf\u00e9\u2026  PDF OK": "cafe , p d f okay",
    "12.5 km/h, 1 s, 3.5 kg": (
        "twelve point five kilometres per hour , one second , three point five kilograms"
    ),
    "3m, 2 ms, 30 fps": "three metres , two milliseconds , thirty frames per second",
    "a 5 m wall": "a five metres wall",
    "100\u00b0C": "one hundred degrees celsius",
    "007": "zero zero seven",
    "Dr. Who vs. Mr. X": "doctor who versus mister x",
    "no. 5. No. Oh no.": "number five . no . oh no .",
    "wait... what?!": "wait , what ?",
    "what\u2019s Anna's name?": "what is anna's name ?",
    "I'll say I'm 30.": "i will say i am thirty .",
    "Tom & Jerry @ home": "tom and jerry at home",
    "well \u2014 yes -- no": "well , yes , no",
    "\uff14\uff12": "forty two",
    "": "",
    "...": "",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \U0001f600": "",
    "the red circle moves left.": "the red circle moves left .",
    "1\u00bd cups, \u00bc and \u2158": "one and a half cups , a quarter and four over five",
    "x\u00b2 + 2 m\u00b3": "x squared plus two metres cubed",
    "**Note:** it is *so* easy, 3 * 4": "note , it is so easy , three times four",
    "Stra\u00dfe, \u00c6gir, S\u00f8ren, \u0141\u00f3d\u017a": "strasse , aegir , soren , lodz",
}
LEFT_OUT = {
    "hello \u65e5\u672c world \U0001f600 ok": ["\u65e5\u672c", "\U0001f600"],
    "\ud55c\uad6d\uc5b4 test, \ud55c\uad6d\uc5b4": ["\ud55c\uad6d\uc5b4"],  # whole letters, once
    "\u041f\u0440\u0438\u0432\u0435\u0442": ["\u041f\u0440\u0438\u0432\u0435\u0442"],
    "\u00a55 and |x|": ["\u00a5", "|"],
    "\u201ca\u201d `b` (c) \u00a7 caf\u00e9 \u00bd 50% *so*": [],  # nothing that is missed
}


@pytest.mark.parametrize(("text", "said"), CASES.items())
def test_what_is_said(text, said):
    assert " ".join(spoken(text)) == said


@pytest.mark.parametrize("text", CASES)
def test_any_split_says_the_same(text):
    for seed in range(20):
        assert _in_pieces(text, random.Random(seed)) == spoken(text)


@settings(max_examples=150)
@given(
    st.text("ab \t\n.,?!:;-1230%$'/x()", max_size=40) | st.text(max_size=30),
    st.integers(0, 1000),
)
def test_any_text_in_any_split_is_words_and_marks(text, seed):
    found = spoken(text)
    assert _in_pieces(text, random.Random(seed)) == found
    assert not found or found[0] not in MARKS
    assert all(part in MARKS or part.replace("'", "").isalpha() for part in found)
    assert all(not (a in MARKS and b in MARKS) for a, b in pairwise(found))


def _in_pieces(text, rng, stream=None):
    stream, found, at = stream or SpokenStream(), [], 0
    while at < len(text):
        step = rng.randint(1, 5)
        found += stream.push(text[at : at + step])
        at += step
    return found + stream.finish()


@pytest.mark.parametrize(("text", "lost"), LEFT_OUT.items())
def test_what_is_left_out_is_told(text, lost):
    assert unspoken(text) == lost
    for seed in range(5):
        _in_pieces(text, random.Random(seed), stream := SpokenStream())
        assert list(dict.fromkeys(stream.left_out())) == lost and not stream.left_out()


def test_words_come_before_the_text_ends():
    stream = SpokenStream()
    early = []
    for word in ("the", "red", "circle", "moves", "to", "the", "left", "and"):
        early += stream.push(word + " ")
    assert early[:5] == ["the", "red", "circle", "moves", "to"]


def test_said_again_stays_as_it_is():
    for text in CASES:
        once = " ".join(spoken(text))
        assert " ".join(spoken(once)) == once


def test_long_text_takes_no_longer_than_it_should():
    began = time.process_time()
    assert len(spoken("word 12 " * 5000)) == 10000
    assert len(spoken("9" * 20000)) == 20000
    stream = SpokenStream()
    for _ in range(3000):
        stream.push("some more words, ")
    stream.finish()
    assert time.process_time() - began < 20
