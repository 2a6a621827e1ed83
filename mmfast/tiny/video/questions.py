"""Questions about a clip that have exactly one answer, and the ways to word them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from mmfast.tiny.video.scene import COLOURS, DIRECTIONS, SHAPES, Table, corner_of

KINDS = ("colour", "shape", "count", "direction", "speed", "position", "first", "number")

WORDINGS: dict[str, tuple[str, ...]] = {
    "colour": (
        "What colour is the {0}?",
        "What color is the {0}?",
        "Which colour does the {0} have?",
    ),
    "shape": (
        "What shape is the {0} object?",
        "Which shape does the {0} object have?",
        "What is the shape of the {0} object?",
    ),
    "count": (
        "How many objects are there?",
        "How many objects appear in the video?",
        "How many shapes can you see?",
    ),
    "direction": (
        "Which way does the {0} move?",
        "In which direction does the {0} move?",
        "Where is the {0} going?",
    ),
    "speed": (
        "Which moves faster, the {0} or the {1}?",
        "Which is faster, the {0} or the {1}?",
        "What moves faster: the {0} or the {1}?",
    ),
    "position": (
        "Where is the {0} at the {1}?",
        "Where is the {0} at the {1} of the video?",
        "In which corner is the {0} at the {1}?",
    ),
    "first": (
        "Which appears first, the {0} or the {1}?",
        "Which came first, the {0} or the {1}?",
        "What appears first: the {0} or the {1}?",
    ),
    "number": (
        "What number is on the screen?",
        "Which number is shown?",
        "What number appears in the video?",
    ),
}


@dataclass(frozen=True)
class Fact:
    """A question's kind, the words that fill its wording, and its answer."""

    kind: str
    slots: tuple[str, ...]
    answer: str

    def ask(self, wording: int) -> str:
        """The question in one of the wordings of its kind."""
        return WORDINGS[self.kind][wording].format(*self.slots)


def facts(table: Table, margin: bool = False) -> list[Fact]:
    """Facts about a clip that can be asked without ambiguity.

    `margin` leaves out close comparisons, as evaluation does: speeds of things that are hardly in
    sight together, appearances less than 3 samples apart.
    """
    things = [i for i in range(table.count) if table.clear(i).sum() >= 3]
    found = [*_looks(table, things), *_places(table, things), *_orders(table, things, margin)]
    if len(things) == table.count:
        found.append(Fact("count", (), str(table.count)))
    if table.number >= 0 and table.shown.sum() >= 2:
        found.append(Fact("number", (), str(table.number)))
    return found


def _looks(table: Table, things: list[int]) -> Iterator[Fact]:
    colours, shapes = tuple(COLOURS), SHAPES
    for i in things:
        if (table.shape == table.shape[i]).sum() == 1:
            yield Fact("colour", (shapes[table.shape[i]],), colours[table.colour[i]])
        if (table.colour == table.colour[i]).sum() == 1:
            yield Fact("shape", (colours[table.colour[i]],), shapes[table.shape[i]])


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
