"""The domain of the embedded speech model: sentences, questions and the grammar of both.

A text is for training or for evaluation by its own checksum, so neither is ever seen by the other
whatever the seeds; texts of one or two words and fixed phrases are for training alone.
"""

from __future__ import annotations

import re
import zlib
from functools import cache
from typing import Literal

import numpy as np

from mmfast.core.errors import SpecError
from mmfast.tiny.espeak import EspeakVoice
from mmfast.tiny.questions import WORDINGS, Fact
from mmfast.tiny.speech_text_lines import LINES, PHRASES
from mmfast.tiny.speech_text_rules import (
    CARRIERS,
    DIGITS,
    RULES,
    SENTENCES,
    TEENS,
    TENS,
    spoken_wording,
)

Split = Literal["train", "eval"]
MARKS = (",", ".", "?")
SHARE = 8  # one text of so many is for evaluation
GROUP = re.compile(r"[a-z']+|[,.?]")
REFERENCE = re.compile(r"<([a-z ]+)>")

# Two men and two women that the recogniser understands best of the variants of en-us.
VOICE_NAMES = ("en-us", "en-us+m3", "en-us+f2", "en-us+f3")
SPEEDS = (135, 155, 175)  # words per minute
PITCHES = (35, 50, 65)
# More voices are listened to than the model speaks with.
HEARD_NAMES = (
    *VOICE_NAMES,
    *("en-us+m1", "en-us+m2", "en-us+m4", "en-us+m7", "en-us+f1", "en-us+f4", "en-us+f5"),
)
HEARD_SPEEDS, HEARD_PITCHES = (125, 210), (20, 80)  # from, to


def voice(name: int = 0, speed: int = 1, pitch: int = 1) -> EspeakVoice:
    """One of the 4 x 3 x 3 ways in which the model speaks."""
    return EspeakVoice(VOICE_NAMES[name], SPEEDS[speed], PITCHES[pitch])


VOICES = tuple(voice(v, s, p) for v in range(4) for s in range(3) for p in range(3))


def heard_voice(rng: np.random.Generator) -> EspeakVoice:
    """One of the many ways in which the model may be spoken to."""
    name = HEARD_NAMES[int(rng.integers(len(HEARD_NAMES)))]
    rate, pitch = rng.integers(*HEARD_SPEEDS), rng.integers(*HEARD_PITCHES)
    spread, volume = rng.integers(30, 70), rng.integers(50, 110)
    return EspeakVoice(name, int(rate), int(pitch), int(spread), int(volume))


def groups(text: str) -> list[str]:
    """Words and punctuation marks of a text of the domain."""
    return GROUP.findall(text)


def joined(parts: list[str]) -> str:
    """The text of words and marks."""
    return re.sub(r" ([,.?])", r"\1", " ".join(parts))


def number_words(number: int) -> str:
    """0 to 999 in words, such as "two hundred and five".

    Raises:
        SpecError: Another number.
    """
    if not 0 <= number <= 999:
        raise SpecError(f"number={number} is not in 0 to 999, the numbers of the domain")
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    words = [f"{DIGITS[hundreds - 1]} hundred"] if hundreds else []
    if rest and hundreds:
        words.append("and")
    if 10 <= rest < 20:
        words.append(TEENS[rest - 10])
    else:
        words += [TENS[tens - 2]] if tens else []
        words += [DIGITS[ones - 1]] if ones else []
    return " ".join(words) or "zero"


def split_of(text: str) -> Split:
    """Which of the two a text is for."""
    words = [part for part in groups(text) if part not in MARKS]
    if len(words) <= 2 or text in PHRASES:
        return "train"
    return "eval" if zlib.crc32(" ".join(words).encode()) % SHARE == 0 else "train"


def expand(text: str, rng: np.random.Generator) -> str:
    """Fill the rules of a text at random."""
    while found := REFERENCE.search(text):
        choices = RULES[found[1]]
        chosen = choices[int(rng.integers(len(choices)))]
        text = text[: found.start()] + chosen + text[found.end() :]
    return text


def sentence(rng: np.random.Generator, split: Split = "train") -> str:
    """A sentence to say; in training now and then a short answer or a fixed phrase."""
    while True:
        draw = rng.random()
        if split == "train" and draw < 0.06:
            return PHRASES[int(rng.integers(len(PHRASES)))]
        start = "short" if draw < 0.16 else SENTENCES[int(rng.integers(len(SENTENCES)))]
        text = expand(f"<{start}>", rng)
        if split_of(text) == split:
            return text


def question(rng: np.random.Generator, split: Split = "train") -> str:
    """A question about a clip as it is spoken."""
    while True:
        carrier = "<carrier>" if rng.random() < 0.5 else ""
        text = expand(f"{carrier}<clip question>", rng)
        if split_of(text) == split:
            return text


def spoken_variants(typed_question: str) -> list[str]:
    """The ways in which a typed question may be spoken: alone, and behind each carrier."""
    return [carrier + spoken_wording(typed_question) for carrier in CARRIERS]


def asked(fact: Fact, rng: np.random.Generator, split: Split = "train") -> str:
    """A question about a fact of a clip as it is spoken, in some wording."""
    wordings = [fact.ask(i) for i in range(len(WORDINGS[fact.kind]))]
    ways = [way for wording in wordings for way in spoken_variants(wording)]
    fitting = [way for way in ways if split_of(way) == split]
    return (fitting or ways)[int(rng.integers(len(fitting or ways)))]


def spoken_answer(answer: str) -> str:
    """A typed answer such as "42" or "top left", as it is said."""
    return number_words(int(answer)) if answer.isdecimal() else answer.lower()


@cache
def words() -> tuple[str, ...]:
    """Every word of the domain, in alphabetic order."""
    texts = [*PHRASES, *LINES, *(alternative for rule in RULES.values() for alternative in rule)]
    found = {part for text in texts for part in groups(REFERENCE.sub(" ", text))}
    return tuple(sorted(found - set(MARKS)))


WORDS = words()
