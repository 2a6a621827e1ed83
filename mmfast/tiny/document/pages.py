"""Pages of high resolution: things with printed numbers beside them, too small for an overview.

A page is three clips wide and high, one overview and nine tiles for LLaVA-OneVision: numbers can
only be read in tiles, places only seen from all. Labels of visual tokens make the decoder learn
sooner, since one answer a question says little about 1,475 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from einops import reduce
from numpy.typing import NDArray
from torch import Tensor

from mmfast.tiny.video import scene
from mmfast.tiny.video.questions import Fact, look_facts

CELLS = 3  # cells of a page in each direction, one tile each
LEAST, MOST = 3, 6  # things on a page
KINDS = ("entry", "colour", "shape", "count", "position")


@dataclass(frozen=True)
class PageEntry:
    """A thing on a page, and the number printed beside it."""

    shape: str
    colour: str
    cell: tuple[int, int]  # row and column
    number: int | None

    @property
    def name(self) -> str:
        """Name such as "red circle"."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Page:
    """A page and its entries."""

    picture: NDArray[np.uint8]  # [CELLS * PIXELS, CELLS * PIXELS, 3]
    entries: tuple[PageEntry, ...]
    things: NDArray[np.int64]  # [rows, columns] of patches: 1 + the entry whose thing is there
    panels: NDArray[np.int64]  # the same for the numbers


def make_page(purpose: int, seed: int, index: int) -> Page:
    """Page number `index` of a seed; the same arguments give the same page."""
    rng = np.random.default_rng([purpose, seed, index, 7])
    side = CELLS * scene.PIXELS
    picture = scene.ground(rng, side)[:side, :side].copy()
    things, panels = np.zeros((2, CELLS * scene.PATCHES, CELLS * scene.PATCHES), np.int64)
    pairs = [(s, c) for s in scene.SHAPES for c in scene.COLOURS]
    count = int(rng.integers(LEAST, MOST + 1))
    chosen = [pairs[i] for i in rng.choice(len(pairs), count, replace=False)]
    cells = rng.choice(CELLS**2, count, replace=False)
    entries = []
    for place, ((shape, colour), cell) in enumerate(zip(chosen, cells, strict=True)):
        row, column = divmod(int(cell), CELLS)
        number = int(rng.integers(10, 100)) if place < 2 or rng.random() < 0.5 else None
        radius = float(rng.uniform(9.0, 11.5))
        (x, y), corner = arrange(rng, radius)
        thing = scene.Thing(shape, colour, radius, (0.0, 0.0), (0.0, 0.0), 0, 1)
        shift = np.array([column * scene.SIDE, row * scene.SIDE])
        owner = np.zeros((side, side), np.uint8)
        scene.paint(picture, owner, thing, place, (np.array([x, y]) + shift) * scene.SCALE)
        things[_patches(owner)] = place + 1
        if number is not None:
            left, top = (int(v) for v in np.array(corner) + shift)
            owner[:] = 0
            scene.paint_panel(picture, owner, scene.Panel(number, (left, top), 0, 1))
            panels[_patches(owner)] = place + 1
        entries.append(PageEntry(shape, colour, (row, column), number))
    return Page(np.clip(picture, 0, 255).astype(np.uint8), tuple(entries), things, panels)


def _patches(owner: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Patches a good part of which is painted: pixels [S, S] to [rows, columns]."""
    side = CELLS * scene.PATCHES
    painted = (owner > 0).astype(np.float64)
    share = reduce(painted, "(y p) (x q) -> y x", "mean", y=side, x=side)
    return np.asarray(share > 0.25)


def arrange(rng: np.random.Generator, radius: float) -> tuple[tuple[float, float], tuple[int, int]]:
    """Centre of a thing and corner of the panel beside it, in units of its cell."""
    while True:
        left, top = int(rng.integers(0, 5)) * 16, int(rng.integers(0, 10)) * 8
        away = radius + rng.uniform(3, 6)
        dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1))[rng.integers(4)]
        x = left + scene.BOX[0] / 2 + dx * (scene.BOX[0] / 2 + away) + abs(dy) * rng.uniform(-6, 6)
        y = top + scene.BOX[1] / 2 + dy * (scene.BOX[1] / 2 + away) + abs(dx) * rng.uniform(-4, 4)
        if radius * 1.2 < min(x, y) and max(x, y) < scene.SIDE - radius * 1.2:
            return (float(x), float(y)), (left, top)


def page_facts(page: Page) -> Iterator[Fact]:
    """Facts about a page that can be asked without ambiguity."""
    looks = [(entry.shape, entry.colour) for entry in page.entries]
    for entry, look in zip(page.entries, looks, strict=True):
        if entry.number is not None:
            yield Fact("entry", (entry.name,), str(entry.number))
        yield from look_facts(look, looks)
        row, column = entry.cell
        if row != 1 and column != 1:
            corner = f"{'bottom' if row else 'top'} {'right' if column else 'left'}"
            yield Fact("position", (entry.name,), corner)
    yield Fact("count", (), str(len(looks)))


PARTS = {
    "row": CELLS, "column": CELLS, "tens": 10, "units": 10,
    "colour": len(scene.COLOURS), "shape": len(scene.SHAPES),
    "own tens": 10, "own units": 10, "begun": MOST + 1,
    "own colour": len(scene.COLOURS), "own shape": len(scene.SHAPES),
}  # fmt: skip


def _begun(things: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count at every patch of a thing the things whose first patch is not behind it."""
    order = np.arange(things.size).reshape(things.shape)
    first = np.array([order[things == number].min() for number in np.unique(things[things > 0])])
    begun = (first[:, None, None] <= order).sum(0)
    return np.where(things > 0, begun, scene.IGNORE)


def page_labels(page: Page) -> Tensor:
    """Labels of every visual token but the last newline, `[parts, tokens]`, IGNORE where none.

    A thing's token predicts its number, a number's its thing, where that came earlier; a number's
    also the number, and a thing's its look, and how many things have begun with it.
    """
    side = CELLS * scene.PATCHES
    maps = np.full((len(PARTS), side, side), scene.IGNORE)
    at = np.arange(side) // scene.PATCHES
    maps[0], maps[1] = at[:, None], at[None, :]
    order = np.arange(side * side).reshape(side, side)
    for number, entry in enumerate(page.entries, start=1):
        thing, panel = page.things == number, page.panels == number
        maps[9][thing] = tuple(scene.COLOURS).index(entry.colour)
        maps[10][thing] = scene.SHAPES.index(entry.shape)
        if entry.number is None or not thing.any() or not panel.any():
            continue
        maps[6][panel], maps[7][panel] = divmod(entry.number, 10)
        late = thing & (order > order[panel].mean())
        maps[2][late], maps[3][late] = divmod(entry.number, 10)
        late = panel & (order > order[thing].mean())
        maps[4][late] = tuple(scene.COLOURS).index(entry.colour)
        maps[5][late] = scene.SHAPES.index(entry.shape)
    maps[8] = _begun(page.things)
    labels = flat_labels(maps)
    small = reduce(page.things, "(y p) (x q) -> y x", "max", p=CELLS, q=CELLS)
    labels[8, : scene.PATCHES**2] = torch.from_numpy(_begun(small).ravel())
    return labels


def flat_labels(maps: NDArray[np.int64]) -> Tensor:
    """Maps of patches `[parts, rows, columns]` as labels of overview, lines and newlines."""
    lines = np.concatenate([maps, np.full((*maps.shape[:2], 1), scene.IGNORE)], 2)  # newlines
    overview = np.full((len(maps), scene.PATCHES**2), scene.IGNORE)
    flat = np.concatenate([overview, lines.reshape(len(maps), -1)[:, :-1]], 1)
    return torch.from_numpy(flat)
