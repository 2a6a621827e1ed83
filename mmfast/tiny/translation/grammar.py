"""Synchronous grammar: every rule writes a sentence in English and in a second, generated language.

The second language, Velda, has one right translation of every sentence and an order of its own:
the verb comes last, adjectives and numbers follow their noun, adjectives agree with it, the tens of
a number follow its units, and two places come in reverse. So one who translates while listening
has to wait, at every place for another number of words.
"""

from __future__ import annotations

import re
import zlib
from itertools import accumulate
from typing import Literal, NamedTuple

import numpy as np

Split = Literal["train", "eval"]
SHARE = 8  # one sentence of so many is for evaluation
# English and Velda; the last letter of a noun is its class, which adjectives take on.
SHAPES = {
    "circle": "ronda",
    "square": "kado",
    "triangle": "trigo",
    "star": "stela",
    "cross": "kruz",
}
COLOURS = {
    "red": "ruv", "green": "gel", "blue": "bim", "yellow": "sol", "purple": "vin", "white": "lum",
    "black": "nok", "orange": "tam", "pink": "pel", "brown": "dor",
}  # fmt: skip
SIZES = {"small": "min", "big": "gran"}
MOVES = {"moves": "mira", "goes": "vada", "is moving": "mirasta", "is going": "vadasta"}
DIRECTIONS = {"left": "levo", "right": "desto", "up": "supo", "down": "subo"}
SIDES = {"left": "levo", "right": "desto", "top": "supo", "bottom": "subo"}
PACES = {"slowly": "lenta", "quickly": "rapa", "fast": "rapa"}
ORDERS = {"before": "anta", "after": "posta"}
UNITS = {"seconds": "sekun", "minutes": "minuta", "hours": "hora", "metres": "metra"}
DIGITS = dict(zip(
    ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    ("un", "du", "tri", "kor", "pen", "sek", "sev", "ot", "nev"), strict=True,
))  # fmt: skip
TENS = dict(zip(
    ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"),
    ("dudek", "tridek", "kordek", "pendek", "sekdek", "sevdek", "otdek", "nevdek"), strict=True,
))  # fmt: skip
NAMES = (
    "anna", "ben", "david", "emma", "frank", "george", "helen", "jack", "laura", "maria", "peter",
    "susan",
)  # fmt: skip
# Slots in angle brackets; a slot with a number stands for one phrase on both sides.
CLAUSES = (
    ("<sized> <moves> <direction>", "<sized> <direction> <moves>"),
    ("<sized> <moves> <pace> to the <side>", "<sized> al <side> <pace> <moves>"),
    (
        "<thing> goes from the <side 1> to the <side 2>",
        "<thing> al <side 2> del <side 1> vada",
    ),
    ("<thing 1> is next to <thing 2>", "<thing 1> <thing 2> apud esa"),
    ("<thing 1> appears <order> <thing 2>", "<thing 1> <thing 2> <order> apara"),
    ("<thing 1> is faster than <thing 2>", "<thing 1> <thing 2> pli rapo esa"),
    ("there are <few> <shapes> on the screen", "sur skrin <shapes> <few> esa"),
    (
        "i can see <few 1> <shapes 1> and <few 2> <shapes 2>",
        "mi <shapes 1> <few 1> e <shapes 2> <few 2> vida",
    ),
    ("the number on the screen is <number>", "sur skrin numer <number> esa"),
    ("after <number> <unit> <thing> stops", "<unit> <number> posta <thing> stopa"),
    ("my favourite colour is <colour>", "mia kolora <colour>a esa"),
    ("<name> has <few> <shapes>", "<name> <shapes> <few> hava"),
    ("i like <sized 1> but not <thing 2>", "mi <sized 1> ama mo <thing 2> ne"),
    ("please wait <number> <unit>", "<unit> <number> dona paza"),
    ("the video ends <order> <number> <unit>", "video <unit> <number> <order> fina"),
)  # fmt: skip
SLOT = re.compile(r"<([a-z]+)( \d)?>")
PART = re.compile(r"(<[a-z]+(?: \d)?>|\w+)\w*")  # a slot, or a word of its own
# Words of clauses outside of slots, and the last English word that they need
ALIGNED = {
    "al": "to", "ama": "like", "apara": "appears", "apud": "next", "del": "from", "dona": "please",
    "e": "and", "esa": "is", "fina": "ends", "hava": "has", "kolora": "colour", "mi": "i",
    "mia": "my", "mo": "but", "ne": "not", "numer": "number", "paza": "wait", "pli": "faster",
    "posta": "after", "rapo": "faster", "skrin": "screen", "stopa": "stops", "sur": "on",
    "vada": "goes", "vida": "see", "video": "video",
}  # fmt: skip
Pair = tuple[str, str]


class AlignedPair(NamedTuple):
    """A sentence with `needs`: how many English words decide each Velda word and those before it.

    A number that ends in tens needs the word behind it, since units may follow; so a word at the
    end of a sentence may need one word more than there are.
    """

    english: str
    velda: str
    needs: tuple[int, ...]


def pick(table: dict[str, str], rng: np.random.Generator) -> Pair:
    """A word of a table with its translation."""
    words = list(table.items())
    return words[int(rng.integers(len(words)))]


def ending(noun: str) -> str:
    """The letter of adjectives beside a noun: that of its class, "i" where it has none."""
    return noun[-1] if noun[-1] in "ao" else "i"


def thing(rng: np.random.Generator, sized: bool = False) -> Pair:
    """A definite thing of a colour, now and then with its size."""
    (shape, noun), (colour, stem) = pick(SHAPES, rng), pick(COLOURS, rng)
    english, velda = f"{colour} {shape}", f"{noun} {stem}{ending(noun)}"
    if sized and rng.random() < 0.5:
        size, own = pick(SIZES, rng)
        english, velda = f"{size} {english}", f"{velda} {own}{ending(noun)}"
    return f"the {english}", velda


def shapes(rng: np.random.Generator) -> Pair:
    """Several things of a colour."""
    (shape, noun), (colour, stem) = pick(SHAPES, rng), pick(COLOURS, rng)
    plural = f"{shape}es" if shape.endswith("s") else f"{shape}s"
    return f"{colour} {plural}", f"{noun}n {stem}{ending(noun)}n"


def number(rng: np.random.Generator) -> Pair:
    """A number of 1 to 99: the tens follow the units."""
    (unit, own), (ten, tens) = pick(DIGITS, rng), pick(TENS, rng)
    kind = rng.random()
    if kind < 0.4:
        return unit, own
    return (ten, tens) if kind < 0.6 else (f"{ten} {unit}", f"{own} e {tens}")


TABLES = {
    "moves": MOVES, "direction": DIRECTIONS, "side": SIDES, "pace": PACES, "order": ORDERS,
    "unit": UNITS, "colour": COLOURS,
}  # fmt: skip


def phrase(kind: str, rng: np.random.Generator) -> Pair:
    """The content of a slot, in both languages."""
    if kind in TABLES:
        return pick(TABLES[kind], rng)
    if kind == "few":
        return pick({word: DIGITS[word] for word in ("two", "three", "four", "five", "six")}, rng)
    if kind == "name":
        name = NAMES[int(rng.integers(len(NAMES)))]
        return name, name
    if kind in ("thing", "sized"):
        return thing(rng, kind == "sized")
    return shapes(rng) if kind == "shapes" else number(rng)


def clause(rng: np.random.Generator) -> AlignedPair:
    """A clause in both languages."""
    english, velda = CLAUSES[int(rng.integers(len(CLAUSES)))]
    found = {slot[0]: phrase(slot[1], rng) for slot in SLOT.finditer(english)}
    ends, read = dict[str, int](), 0
    for part in PART.findall(english):
        words = found.get(part, (part, ""))[0]
        read += len(words.split())
        ends[part] = read + (words in TENS)  # units may follow
    needs = list[int]()
    for part in PART.findall(velda):
        word = "are" if part == "esa" and "is" not in ends else ALIGNED.get(part, part)
        needs += [ends[word]] * len(found.get(part, (part, part))[1].split())
    first, second = (
        SLOT.sub(lambda slot, side=side: found[slot[0]][side], text)  # type: ignore[misc]
        for side, text in enumerate((english, velda))
    )
    return AlignedPair(first, second, tuple(accumulate(needs, max)))


def split_of(english: str) -> Split:
    """The split that a sentence belongs to, by its own checksum."""
    return "eval" if zlib.crc32(english.encode()) % SHARE == 0 else "train"


def aligned(rng: np.random.Generator, split: Split = "train") -> AlignedPair:
    """A sentence of one to three clauses, in English and in Velda, word by word."""
    while True:
        parts = [clause(rng) for _ in range(1 + int(rng.integers(3)))]
        english, velda = " and ".join(p.english for p in parts), " e ".join(p.velda for p in parts)
        if split_of(english) == split:
            break
    needs, read = list[int](), 0
    for part in parts:
        needs += [read] * bool(read)  # "e" for "and"
        needs += [read + need for need in part.needs]
        read += len(part.english.split()) + 1
    return AlignedPair(english, velda, tuple(accumulate(needs, max)))


def sentence(rng: np.random.Generator, split: Split = "train") -> Pair:
    """A sentence of one to three clauses, in English and in Velda."""
    found = aligned(rng, split)
    return found.english, found.velda


def vocabulary() -> list[str]:
    """All words of both languages, in order."""
    tables = (SHAPES, COLOURS, SIZES, DIGITS, TENS, *TABLES.values())
    pairs = [pair for table in tables for pair in table.items()]
    stems = [*COLOURS.values(), *SIZES.values()]
    found = {word for english, velda in pairs for word in (*english.split(), velda)}
    found |= {
        f"{stem}{letter}{plural}" for stem in stems for letter in "aoi" for plural in ("", "n")
    }
    found |= {f"{s}es" if s.endswith("s") else f"{s}s" for s in SHAPES}
    found |= {f"{noun}n" for noun in SHAPES.values()}
    texts = [SLOT.sub(" ", text) for pair in CLAUSES for text in pair]
    found |= {word for text in texts for word in text.split()} | {*NAMES, "the", "and", "e"}
    return sorted(found)
