"""Questions about clips and pictures that have exactly one answer, and the ways to word them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mmfast.tiny.video.scene import DIRECTIONS, Table, corner_of

KINDS = ("colour", "shape", "count", "direction", "speed", "position", "first", "number")
Wordings = Mapping[str, tuple[str, ...]]  # by kind of question
Look = tuple[str, str]  # shape and colour
Places = NDArray[np.floating[Any]]


def parse_grammar(text: str) -> dict[str, tuple[str, ...]]:
    """Parse rules of the form `name = alternative | alternative`; indented lines continue one."""
    rules: dict[str, tuple[str, ...]] = {}
    for line in text.strip().replace("\n    ", " ").splitlines():
        name, _, body = line.partition(" =")
        found: list[str] = []
        for part in body.split("|"):
            weight, alternative = re.fullmatch(r"\s*(?:/(\d+)/ )?(.*?)\s*", part).groups()  # type: ignore[union-attr]
            found += [alternative] * int(weight or 1)
        rules[name] = tuple(found)
    return rules


WORDINGS = parse_grammar("""
colour = What colour is the {0}? | What color is the {0}? | Which colour does the {0} have?
shape =
    What shape is the {0} object? | Which shape does the {0} object have?
    | What is the shape of the {0} object?
count =
    How many objects are there? | How many objects appear in the video?
    | How many shapes can you see?
direction =
    Which way does the {0} move? | In which direction does the {0} move?
    | Where is the {0} going?
speed =
    Which moves faster, the {0} or the {1}? | Which is faster, the {0} or the {1}?
    | What moves faster: the {0} or the {1}?
position =
    Where is the {0} at the {1}? | Where is the {0} at the {1} of the video?
    | In which corner is the {0} at the {1}?
first =
    Which appears first, the {0} or the {1}? | Which came first, the {0} or the {1}?
    | What appears first: the {0} or the {1}?
number =
    What number is on the screen? | Which number is shown? | What number appears in the video?
""")
# The vocabulary is fixed by the questions about clips, so these use no other words.
STILL_WORDINGS = WORDINGS | parse_grammar("""
entry = What number is at the {0}? | Which number is at the {0}?
count = How many objects are there? | How many shapes can you see?
position = Where is the {0}? | In which corner is the {0}?
number = What number is on the screen? | Which number is shown?
""")


@dataclass(frozen=True)
class Fact:
    """A question's kind, the words that fill its wording, and its answer."""

    kind: str
    slots: tuple[str, ...]
    answer: str

    def ask(self, wording: int, table: Wordings = WORDINGS) -> str:
        """The question in one of the wordings of its kind; they take turns."""
        words = table[self.kind]
        return words[wording % len(words)].format(*self.slots)


def facts(table: Table, margin: bool = False) -> list[Fact]:
    """Facts about a clip without ambiguity; `margin` leaves out close comparisons."""
    things = [i for i in range(table.count) if table.clear(i).sum() >= 3]
    looks = table.looks
    found = [fact for i in things for fact in look_facts(looks[i], looks)]
    found += [*_places(table, things), *_orders(table, things, margin)]
    if len(things) == table.count:
        found.append(Fact("count", (), str(table.count)))
    if table.number >= 0 and table.shown.sum() >= 2:
        found.append(Fact("number", (), str(table.number)))
    return found


def look_facts(look: Look, looks: Sequence[Look]) -> Iterator[Fact]:
    """Colour and shape of one of several things where no other thing shares its name."""
    (shape, colour), (shapes, colours) = look, zip(*looks, strict=True)
    if shapes.count(shape) == 1:
        yield Fact("colour", (shape,), colour)
    if colours.count(colour) == 1:
        yield Fact("shape", (colour,), shape)


def picture_facts(
    looks: Sequence[Look], places: Places, seen: Places, number: int | None
) -> Iterator[Fact]:
    """Facts about a picture from the looks, places and visible shares of its things."""
    clear = [i for i, share in enumerate(seen) if share >= 0.6]
    for i in clear:
        yield from look_facts(looks[i], looks)
        if corner := corner_of(places[i], 7):
            yield Fact("position", (" ".join(reversed(looks[i])),), corner)
    if looks and len(clear) == len(looks):
        yield Fact("count", (), str(len(looks)))
    if number is not None:
        yield Fact("number", (), str(number))


def still_facts(table: Table, frame: int) -> list[Fact]:
    """Facts about one frame of a clip that can be asked."""
    there = [i for i in range(table.count) if table.alive[i, frame]]
    number = table.number if table.shown[frame] else None
    looks = [table.looks[i] for i in there]
    return list(picture_facts(looks, table.place[there, frame], table.seen[there, frame], number))


def _places(table: Table, things: list[int]) -> Iterator[Fact]:
    for i in things:
        seen = np.flatnonzero(table.clear(i))
        move = table.world[i, seen[-1]] - table.world[i, seen[0]]
        main = int(np.abs(move).argmax())
        if abs(move[main]) >= 10 and abs(move[1 - main]) <= 0.5 * abs(move[main]):
            way = next(n for n, d in DIRECTIONS.items() if d[main] * move[main] > 0)
            yield Fact("direction", (table.name(i),), way)
        for end, frame in (("start", 0), ("end", -1)):
            corner = corner_of(table.place[i, frame], 7)
            if corner and table.clear(i)[frame]:
                yield Fact("position", (table.name(i), end), corner)


def _orders(table: Table, things: list[int], margin: bool) -> Iterator[Fact]:
    together, apart = (5, 3) if margin else (0, 2)  # sampled frames
    for i, j in permutations(things, 2):
        names = (table.name(i), table.name(j))
        pace = [float(np.hypot(*(table.world[k, 1] - table.world[k, 0]))) for k in (i, j)]
        both = int((table.clear(i) & table.clear(j)).sum())
        if both >= together and max(pace) >= 1.6 * min(pace):
            yield Fact("speed", names, names[int(pace[1] > pace[0])])
        born = [int(table.alive[k].argmax()) for k in (i, j)]
        seen = [bool(table.clear(k)[b]) for k, b in zip((i, j), born, strict=True)]
        if abs(born[0] - born[1]) >= apart and all(seen):
            yield Fact("first", names, names[int(born[1] < born[0])])
