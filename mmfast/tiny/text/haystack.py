"""Generator of long documents with facts to retrieve, after the idea of RULER (arXiv 2404.06654).

Sentences without meaning surround four kinds of facts: one password, many keys that each open one
thing, variables that get their number from one another, and animals that come by some times. The
words of a thing also stand in the sentences around it, so a fact is known by its place only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


Kind = Literal["single", "keys", "variables", "count"]
KINDS: tuple[Kind, ...] = ("single", "keys", "variables", "count")
LONGEST = 16_384  # tokens whose distances training stretches over
HOPS = 2  # variables of a chain; the first of them has the number
MOST = 5  # times that an animal comes by, at most
NUMBERS = 100
KEYS = tuple(f"{a}{b}{c}{d}" for a, b in zip("bdfgklmn", "aeiouaei", strict=True)
             for c in "rstv" for d in "aiou")  # fmt: skip
VARIABLES = tuple(f"{a}{b}" for a in "pqrstvxz" for b in "bcdfghjk")
ANIMALS = _words(
    "fox cat owl hen goat frog crow deer mouse horse sheep snake whale otter camel tiger"
)
ADJECTIVES = _words(
    "red green blue black white pale dark bright tall low wide narrow old new warm cold soft hard "
    "round flat deep light heavy quiet loud dry wet clean plain rough smooth sweet"
)
NOUNS = _words(
    "river tower garden bridge window candle ladder basket mirror carpet bottle hammer wagon "
    "anchor barrel blanket button castle chimney curtain engine feather fountain harbour kettle "
    "lantern meadow needle orchard pillow saddle temple"
)
VERBS = _words("stands lies rests waits shines falls turns moves")
PLACES = _words("near behind beside under above before beyond within")
TIMES = _words("today again often always slowly here alone still")
GLUE = _words("the a one key password let came by question . ?")


@dataclass(frozen=True)
class NeedleQuestion:
    """A question about a document, what stands before its answer, and its only right answer."""

    kind: Kind
    text: str
    answer: str

    @property
    def lead(self) -> str:
        """The word between the question and its answer, which names again what was asked."""
        return words_of(self.text)[1]


@dataclass(frozen=True)
class FactCounts:
    """Numbers of facts of each kind in a document."""

    keys: int = 8
    chains: int = 3
    animals: int = 4


@dataclass(frozen=True)
class Haystack:
    """Sentences of a document, in order, and a question about every fact in it."""

    sentences: tuple[str, ...]
    questions: tuple[NeedleQuestion, ...]

    @property
    def text(self) -> str:
        """The whole document."""
        return " ".join(self.sentences)


def words_of(text: str) -> list[str]:
    """Words and marks of a text, a token each."""
    return text.replace(".", " .").replace("?", " ?").split()


def vocabulary() -> list[str]:
    """All words that a document or an answer may hold, in order."""
    tables = (GLUE, KEYS, VARIABLES, ANIMALS, ADJECTIVES, NOUNS, VERBS, PLACES, TIMES)
    return [*dict.fromkeys(word for table in tables for word in table), *map(str, range(NUMBERS))]


def make_document(length: int, rng: np.random.Generator, facts: FactCounts) -> Haystack:
    """Document of at most `length` tokens, by less than a sentence, its facts at random places.

    Links of a chain stand in their order. Questions come in random order.
    """
    told, questions = _facts(rng, facts)
    order = rng.permutation(len(questions))
    known = sum(len(words_of(sentence)) for group in told for sentence in group)
    around, room = list[str](), length - known
    while room > 0:
        sentence = _filler(rng)
        room -= len(words_of(sentence))
        around.append(sentence)
    if around and room < 0:
        around.pop()
    total = len(around) + sum(map(len, told))
    slots = rng.permutation(total)
    sentences, at = [""] * total, 0
    for group in told:
        for slot, sentence in zip(sorted(slots[at : at + len(group)]), group, strict=True):
            sentences[slot] = sentence
        at += len(group)
    for slot, sentence in zip(slots[at:], around, strict=True):
        sentences[slot] = sentence
    return Haystack(tuple(sentences), tuple(questions[i] for i in order))


def _facts(
    rng: np.random.Generator, facts: FactCounts
) -> tuple[list[list[str]], list[NeedleQuestion]]:
    """Groups of sentences that keep their order, and the questions."""
    thing = _one(NOUNS, rng)
    told = [[f"password {thing}."]]
    questions = [NeedleQuestion("single", "question password?", thing)]
    for key in _some(KEYS, facts.keys, rng):
        thing = _one(NOUNS, rng)
        told.append([f"key {key} {thing}."])
        questions.append(NeedleQuestion("keys", f"question {key}?", thing))
    names = _some(VARIABLES, facts.chains * HOPS, rng)
    for chain in range(facts.chains):
        links, number = names[chain * HOPS : (chain + 1) * HOPS], str(rng.integers(NUMBERS))
        told.append([
            f"let {name} {value}."
            for name, value in zip(links, (number, *links[:-1]), strict=True)
        ])  # fmt: skip
        questions += [NeedleQuestion("variables", f"question {name}?", number) for name in links]
    for animal in _some(ANIMALS, facts.animals, rng):
        times = int(rng.integers(1, MOST + 1))
        told.append([f"one {animal} came by."] * times)
        questions.append(NeedleQuestion("count", f"question {animal}?", str(times)))
    return told, questions


def _some(table: Sequence[str], many: int, rng: np.random.Generator) -> list[str]:
    return [table[i] for i in rng.choice(len(table), many, replace=False)]


def _one(table: Sequence[str], rng: np.random.Generator) -> str:
    return table[int(rng.random() * len(table))]


def _thing(rng: np.random.Generator) -> str:
    return f"{_one(ADJECTIVES, rng)} {_one(NOUNS, rng)}"


def _filler(rng: np.random.Generator) -> str:
    """A sentence that nobody asks about."""
    where = f" {_one(PLACES, rng)} a {_thing(rng)}" if rng.random() < 0.5 else ""
    when = f" {_one(TIMES, rng)}" if rng.random() < 0.5 else ""
    return f"the {_thing(rng)} {_one(VERBS, rng)}{where}{when}."
