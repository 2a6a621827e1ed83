"""Printed pages: a title, a table of things and numbers, and a note, in 12-point text.

A page is as large as the other pages of the document model. No word lies across the border between
two tiles, where a processor cuts it in halves.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from einops import reduce
from numpy.typing import NDArray
from torch import Tensor

from mmfast.tiny.document.fonts import KEPT, TRAINED, Bytes, Stamp, Typeface, typefaces
from mmfast.tiny.document.pages import CELLS, flat_labels
from mmfast.tiny.video import scene
from mmfast.tiny.video.questions import STILL_WORDINGS, Fact, parse_grammar

LETTERS = string.ascii_lowercase + string.digits
TITLES = ("bill", "budget", "delivery", "inventory", "invoice", "list", "menu", "order", "receipt",
          "report")  # fmt: skip
HEADERS = ("amount", "price", "size", "stock", "weight")
ITEMS = ("apples", "bread", "bricks", "butter", "candles", "carrots", "chairs", "cheese", "coffee",
         "cups", "desks", "eggs", "flour", "forks", "garlic", "grapes", "honey", "jam", "keys",
         "knives", "lamps", "lemons", "milk", "mugs", "nails", "nuts", "oil", "onions", "oranges",
         "paper", "pears", "pens", "pepper", "plates", "plums", "rice", "ropes", "salt", "soap",
         "spoons", "stamps", "sugar", "tea", "tomatoes", "towels", "wire", "wood",
         "wool")  # fmt: skip
NOTES = ("ask", "bring", "call", "check", "clean", "close", "cut", "fill", "fold", "hold", "join",
         "keep", "lend", "mark", "open", "pack", "read", "sell", "send", "sign", "sort", "store",
         "wash", "wrap")  # fmt: skip
WORDS = (*TITLES, *HEADERS, *ITEMS, *NOTES)
KINDS = ("cell", "item", "title", "rows", "after")
WORDINGS = parse_grammar("""
cell = What is the {0} of the {1}? | Which {0} do the {1} have? | Read the {0} of the {1}.
item = Which item has the {0} {1}? | What has the {0} {1}? | Which row has the {0} {1}?
title = What is the title? | Read the title. | What is the title of the page?
rows = How many rows are there? | How many rows does the table have? | Count the rows.
after = Which word comes after {0}? | What comes after {0}? | Which word is behind {0}?
""")
PAGE_WORDINGS = STILL_WORDINGS | WORDINGS
MOST = 6  # rows of a table
POINTS = 24.0  # pixels of 12-point text: a page has 144 of them to the inch
TILE, PAGE = scene.PIXELS, CELLS * scene.PIXELS  # sides in pixels
EDGE = 7  # least room between a word and the border of its tile


@dataclass(frozen=True)
class Printed:
    """A word or number on a page."""

    text: str  # as it is asked and answered, whatever its capitals
    role: str  # title, header, item, number or note
    row: int = 0  # of the table, from 1
    header: str = ""  # over a number
    box: tuple[int, int, int, int] = (0, 0, 0, 0)  # left, top, right and bottom, in pixels
    centres: tuple[float, ...] = ()  # of its letters, in pixels from the left


@dataclass(frozen=True)
class PrintedPage:
    """A page, its font, and what is printed on it in the order of reading."""

    picture: Bytes  # [PAGE, PAGE, 3]
    font: str
    words: tuple[Printed, ...]

    def of(self, role: str) -> list[Printed]:
        """The words of a role."""
        return [word for word in self.words if word.role == role]


class _Press:
    """A page in the making: paper, ink, and how far down it is printed."""

    def __init__(self, rng: np.random.Generator, face: Typeface) -> None:
        self.rng, self.face = rng, face
        light, dark = rng.uniform(205, 255, 3), rng.uniform(0, 70, 3)
        if rng.random() < 0.12:
            light, dark = dark, light
        self.ink, self.size = dark, POINTS * float(rng.uniform(0.95, 1.12))
        self.picture = np.broadcast_to(light, (PAGE, PAGE, 3)).copy()
        self.picture += rng.normal(0, rng.uniform(0, 4), (PAGE, PAGE, 1))
        self.pitch = self.size * float(rng.uniform(1.3, 1.6))
        self.down = float(rng.uniform(8, 28 if rng.random() < 0.6 else 180))
        self.capital = rng.random() < 0.4
        self.words = list[Printed]()

    def line(self, high: float) -> int | None:
        """Top of the next line, which no border of tiles cuts; None where the page is full."""
        if self.down % TILE + high > TILE - 2:
            self.down = (self.down // TILE + 1) * TILE + 3
        top = round(self.down)
        self.down += max(high, self.pitch)
        return top if top + high <= PAGE - 2 else None

    def stamp(self, text: str, size: float | None = None, upper: bool = False) -> Stamp:
        """A word in the capitals of this page."""
        text = text.upper() if upper else text.capitalize() if self.capital else text
        return self.face.stamp(text, size or self.size)

    def put(self, stamp: Stamp, left: int, top: int, word: Printed) -> None:
        """Print a stamp at a place, and note the word with its box."""
        ink = stamp.ink
        part = self.picture[top : top + stamp.high, left : left + stamp.wide]
        part += (ink[: part.shape[0], : part.shape[1], None] / 255.0) * (self.ink - part)
        seen = np.flatnonzero(ink.max(0) > 60), np.flatnonzero(ink.max(1) > 60)
        across, along = ((int(s[0]), int(s[-1]) + 1) for s in seen)
        box = (left + across[0], top + along[0], left + across[1], top + along[1])
        centres = tuple(left + centre for centre in stamp.centres)
        self.words.append(replace(word, box=box, centres=centres))

    def rule(self, top: float, left: int, right: int) -> None:
        """A thin line across."""
        at = min(max(round(top), 0), PAGE - 2)
        part = self.picture[at : at + 2, left:right]
        part += 0.5 * (self.ink - part)


def make_print(purpose: int, seed: int, index: int) -> PrintedPage:
    """Printed page number `index` of a seed; in training never in a font of KEPT."""
    rng = np.random.default_rng([purpose, seed, index, 8])
    known = typefaces()
    face = known[int(rng.integers(len(TRAINED) + len(KEPT) * (purpose == scene.EVAL)))]
    press = _Press(rng, face)
    if rng.random() < 0.75:
        _title(press)
    parts = [_table, _note]
    for part in parts if rng.random() < 0.7 else parts[::-1]:
        part(press)
        press.down += float(rng.uniform(0, 14))
    picture = np.clip(press.picture, 0, 255).astype(np.uint8)
    return PrintedPage(picture, face.name, tuple(press.words))


def _title(press: _Press) -> None:
    rng, text = press.rng, TITLES[int(press.rng.integers(len(TITLES)))]
    size, upper = press.size * float(rng.uniform(1.2, 1.5)), bool(rng.random() < 0.3)
    room = (TILE - 2 * EDGE) / press.stamp(text, size, upper).wide
    stamp = press.stamp(text, size * min(room, 1.0), upper)
    top = press.line(stamp.high)
    assert top is not None  # nothing is above
    left = _within(rng, int(rng.integers(CELLS)), stamp.wide)
    press.put(stamp, left, top, Printed(text, "title"))
    press.down += float(rng.uniform(0, 8))


def _within(rng: np.random.Generator, tile: int, wide: int) -> int:
    """Left end of something that lies in a column of tiles."""
    return tile * TILE + int(rng.integers(EDGE, max(TILE - EDGE - wide, EDGE) + 1)) - 3


def _table(press: _Press) -> None:
    """Things and one or two numbers of each, under headers."""
    rng = press.rng
    first = int(rng.random() < 0.3)
    columns = [first, *sorted(rng.choice(np.arange(first + 1, CELLS), _many(rng, first), False))]
    headers = [HEADERS[i] for i in rng.choice(len(HEADERS), len(columns) - 1, False)]
    rows = int(rng.integers(2, MOST + 1))
    items = [ITEMS[i] for i in rng.choice(len(ITEMS), rows, False)]
    numbers = [[str(n) for n in rng.choice(np.arange(10, 100), rows, False)] for _ in headers]
    cells = [[press.stamp(item) for item in items]]
    cells += [[press.stamp(t) for t in (h, *own)] for h, own in zip(headers, numbers, strict=True)]
    wide = [max(stamp.wide for stamp in column) for column in cells]
    lefts = [_within(rng, int(tile), w) for tile, w in zip(columns, wide, strict=True)]
    right, style = bool(rng.random() < 0.4), int(rng.integers(4))
    ends = lefts[0], lefts[-1] + wide[-1]
    for row in range(rows + 1):
        top = press.line(cells[1][0].high)
        if top is None:
            return
        for column, (left, w) in enumerate(zip(lefts, wide, strict=True)):
            if column == 0 and row == 0:
                continue
            stamp = cells[column][row - (column == 0)]
            at = left + (w - stamp.wide) * (right and column > 0)
            header = headers[column - 1] if column else ""
            text = items[row - 1] if column == 0 else ([header, *numbers[column - 1]])[row]
            role = "item" if column == 0 else "number" if row else "header"
            press.put(stamp, at, top, Printed(text, role, row, header if row else ""))
        if style == 3 or (style and row == 0):
            press.rule(top + cells[1][0].high - 1, *ends)


def _many(rng: np.random.Generator, first: int) -> int:
    return 1 if first else 1 + int(rng.random() < 0.6)


def _note(press: _Press) -> None:
    """A few words, line by line."""
    rng = press.rng
    words = [NOTES[i] for i in rng.choice(len(NOTES), int(rng.integers(3, 9)), False)]
    stamps = [press.stamp(word) for word in words]
    gap, left = round(press.size * rng.uniform(0.1, 0.4)), EDGE
    top = press.line(stamps[0].high)
    for word, stamp in zip(words, stamps, strict=True):
        if left % TILE + stamp.wide > TILE - 3:
            left = (left // TILE + 1) * TILE + 2
        if left + stamp.wide > PAGE - 3:
            left, top = EDGE, press.line(stamp.high)
        if top is None:
            return
        press.put(stamp, left, top, Printed(word, "note"))
        left += stamp.wide + gap


def print_facts(page: PrintedPage) -> Iterator[Fact]:
    """Facts about a printed page that can be asked without ambiguity."""
    items = {word.row: word.text for word in page.of("item")}
    for word in page.of("number"):
        yield Fact("cell", (word.header, items[word.row]), word.text)
        yield Fact("item", (word.header, word.text), items[word.row])
    for word in page.of("title"):
        yield Fact("title", (), word.text)
    if items:
        yield Fact("rows", (), str(len(items)))
    note = page.of("note")
    for word, after in pairwise(note):
        yield Fact("after", (word.text,), after.text)


PARTS = {
    "own letter": len(LETTERS), "own word": len(WORDS), "own tens": 10, "own units": 10,
    "item": len(ITEMS), "header": len(HEADERS), "before": len(NOTES), "begun": MOST + 1,
}  # fmt: skip


def print_owners(page: PrintedPage) -> NDArray[np.int64]:
    """1 + the word that covers a good part of a patch, 0 where none: `[rows, columns]`."""
    side = CELLS * scene.PATCHES
    best, owners = np.full((side, side), 0.3), np.zeros((side, side), np.int64)
    for number, word in enumerate(page.words, start=1):
        left, top, right, bottom = word.box
        covered = np.zeros((PAGE, PAGE))
        covered[top:bottom, left:right] = 1
        share = reduce(covered, "(y p) (x q) -> y x", "mean", y=side, x=side)
        owners[share > best] = number
        best = np.maximum(best, share)
    return owners


def print_labels(page: PrintedPage, owners: NDArray[np.int64]) -> Tensor:
    """Labels of every visual token but the last newline, `[parts, tokens]`, IGNORE where none.

    Every token of a word names it, and the letter in its middle; a number's also its row's item and
    its header, a note's the word before it, and an item's how many rows have begun.
    """
    side = CELLS * scene.PATCHES
    named = dict(zip(PARTS, np.full((len(PARTS), side, side), scene.IGNORE), strict=True))
    items = {word.row: word.text for word in page.of("item")}
    last = ""
    middles = (np.arange(side) + 0.5) * (PAGE / side)
    for number, word in enumerate(page.words, start=1):
        mine = owners == number
        near = np.abs(np.array(word.centres)[:, None] - middles).argmin(0)  # letter of each column
        letters = np.array([LETTERS.index(letter) for letter in word.text])[near]
        named["own letter"][mine] = np.broadcast_to(letters, mine.shape)[mine]
        if word.role == "number":
            named["own tens"][mine], named["own units"][mine] = divmod(int(word.text), 10)
            named["item"][mine] = ITEMS.index(items[word.row])
            named["header"][mine] = HEADERS.index(word.header)
            continue
        named["own word"][mine] = WORDS.index(word.text)
        if word.role == "item":
            named["begun"][mine] = word.row
        if word.role == "note":
            if last:
                named["before"][mine] = NOTES.index(last)
            last = word.text
    return flat_labels(np.stack([*named.values()]))
