"""Facts about a view and the items that ask for them: clips, and single frames of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from mmfast.tiny.scenes.looks import SceneView
from mmfast.tiny.scenes.loose import loose_items
from mmfast.tiny.scenes.questions import ABSENT, END, START, STILL, SceneItem, drawn
from mmfast.tiny.video import questions
from mmfast.tiny.video.scene import (
    COLOURS,
    SAMPLED,
    SHAPES,
    SIDE,
    Floats,
    Table,
    corner_of,
)

SIDES = (("left", "right"), ("above", "below"))  # by axis
CENTRE = 5.0  # units from both middle lines up to which a thing is in the centre
WHOLE = 0.9  # share of a thing in sight from which on its box can be asked


def clip_items(view: SceneView, table: Table, margin: bool = False) -> list[SceneItem]:
    """Items of a clip; `margin` leaves out close comparisons."""
    found = []
    for fact in questions.facts(table, margin):
        if fact.kind == "speed" and not view.look.square:
            continue  # the axes have two scales, the table knows one
        slots = fact.slots
        if fact.kind == "position":
            slots = (slots[0], f" at the {slots[1]}")
        found.append(SceneItem(fact.kind, slots, fact.answer))
    for frame, time in ((0, START), (-1, END)):
        found += _central(table, frame, time)
    found.append(SceneItem("background", (), view.look.background))
    sure = [i for i in range(table.count) if table.clear(i).sum() >= 3]
    if len(sure) == table.count:
        found += _exists(view, [table.looks[i] for i in sure], bool(table.shown.any()))
    for frame, time in ((0, START), (-1, END)):
        found += _spatial(view, table, frame, time)
    found += _when(table)
    ways = {item.slots[0]: item.answer for item in found if item.kind == "direction"}
    if set(ways) == {table.name(i) for i in range(table.count)}:
        found.append(SceneItem("describe", (), describe_clip(view, table, ways)))
    found += _followups(found, ways)
    if len(sure) == table.count:
        found += _absent(view, [table.looks[i] for i in sure], bool(table.shown.any()))
    whole = len(sure) == table.count
    return [*found, *loose_items(view, found, table.looks, (START, END), whole)]


def picture_items(view: SceneView, table: Table, frame: int) -> list[SceneItem]:
    """Items of one frame of a clip."""
    found = []
    for fact in questions.still_facts(table, frame):
        slots = (fact.slots[0], STILL) if fact.kind == "position" else fact.slots
        found.append(SceneItem(fact.kind, slots, fact.answer))
    found += _central(table, frame, STILL)
    there = [i for i in range(table.count) if table.alive[i, frame]]
    clear = [i for i in there if table.seen[i, frame] >= 0.6]
    if not there and not table.shown[frame]:
        return []
    found.append(SceneItem("background", (), view.look.background))
    if there == clear:
        looks = [table.looks[i] for i in there]
        found += _exists(view, looks, bool(table.shown[frame]))
        found.append(SceneItem("describe", (), describe_picture(view, table, frame, there)))
    found += [*_spatial(view, table, frame, STILL)]
    found += _followups(found, {})
    if there == clear:
        found += _absent(view, [table.looks[i] for i in there], bool(table.shown[frame]), frame)
    shown = [table.looks[i] for i in there]
    return [*found, *loose_items(view, found, shown, (STILL,), there == clear)]


def place_of(point: Floats) -> str:
    """Corner that a point lies in, or the centre."""
    middle = np.abs(np.asarray(point) - SIDE / 2).max() <= CENTRE
    return "centre" if middle else corner_of(point)


def _central(table: Table, frame: int, time: str) -> Iterator[SceneItem]:
    """Things right in the centre, where it is no matter of a hair."""
    for i in range(table.count):
        place = table.place[i, frame].astype(np.float64)
        if table.alive[i, frame] and table.seen[i, frame] >= 0.6 and place_of(place) == "centre":
            yield SceneItem("position", (table.name(i), time), "centre")


def _exists(view: SceneView, looks: Sequence[questions.Look], number: bool) -> Iterator[SceneItem]:
    """As many things that are there as such that are not, half of the latter nearly there."""
    rng = np.random.default_rng([view.look.seed, 3])
    shapes, colours = {shape for shape, _ in looks}, {colour for _, colour in looks}
    there = [f"{colour} {shape}" for shape, colour in looks]
    near = [
        f"{c} {s}"
        for c in COLOURS
        for s in SHAPES
        if f"{c} {s}" not in there and (c in colours or s in shapes)
    ]
    far = [f"{c} {s}" for c in COLOURS for s in SHAPES if c not in colours and s not in shapes]
    absent = [*drawn(rng, near, 2), *drawn(rng, far, 2)]
    absent += drawn(rng, [s for s in SHAPES if s not in shapes], 2)
    absent += drawn(rng, [f"{c} object" for c in COLOURS if c not in colours], 1)
    shown = [*there, *sorted(shapes), *(f"{c} object" for c in sorted(colours))]
    (shown if number else absent).append("number")
    many = min(len(shown), len(absent))
    for names, word in ((shown, "yes"), (absent, "no")):
        yield from (SceneItem("exists", (name,), word) for name in drawn(rng, names, many))


def _absent(
    view: SceneView, looks: Sequence[questions.Look], number: bool, frame: int | None = None
) -> Iterator[SceneItem]:
    """Questions that take for granted a thing that is not there, half of them nearly there."""
    rng = np.random.default_rng([view.look.seed, 7])
    shapes, colours = {shape for shape, _ in looks}, {colour for _, colour in looks}
    there = [f"{colour} {shape}" for shape, colour in looks]
    missing = [f"{c} {s}" for c in COLOURS for s in SHAPES if f"{c} {s}" not in there]
    near = [n for n in missing if n.split()[0] in colours or n.split()[1] in shapes] or missing

    def item(form: str, name: str, *slots: str) -> SceneItem:
        return SceneItem(ABSENT, (name, *slots), f"there is no {name}.", form)

    for form in ("position", "where", *(() if frame is not None else ("when", "direction"))):
        for name in (*drawn(rng, near, 1), *drawn(rng, missing, 1)):
            time = (START, END)[int(rng.integers(2))] if frame is None else STILL
            yield item(form, name, *((time,) if form in ("position", "where") else ()))
    for form in ("relation", *(() if frame is not None else ("speed", "first"))):
        for known in drawn(rng, there, 1):
            (name,) = drawn(rng, near, 1)
            time = (START, END)[int(rng.integers(2))] if frame is None else STILL
            pair = (name, known) if rng.random() < 0.5 else (known, name)
            slots = (*pair, time) if form == "relation" else pair
            yield SceneItem(ABSENT, slots, f"there is no {name}.", form)
    for shape in drawn(rng, [s for s in SHAPES if s not in shapes], 2):
        yield item("colour", shape)
    for colour in drawn(rng, [c for c in COLOURS if c not in colours], 2):
        yield SceneItem(ABSENT, (colour,), f"there is no {colour} object.", "shape")
    if not number:
        yield SceneItem(ABSENT, (), "there is no number.", "number")
        if frame is None:
            yield item("when", "number")


def _spatial(view: SceneView, table: Table, frame: int, time: str) -> Iterator[SceneItem]:
    rng = np.random.default_rng([view.look.seed, frame % SAMPLED, 5])
    seen = [i for i in range(table.count) if table.alive[i, frame] and table.seen[i, frame] >= 0.6]
    for i in seen:
        if table.seen[i, frame] >= WHOLE:
            box = view.box(i, table.place[i, frame].astype(np.float64))
            yield SceneItem("where", (table.name(i), time), ",".join(f"{edge:02d}" for edge in box))
        for j in seen:
            if i == j:
                continue
            names = (table.name(i), table.name(j))
            gap = (table.place[i, frame] - table.place[j, frame]) * view.look.scale / 2
            main = int(np.abs(gap).argmax())
            if abs(gap[main]) >= 14 and abs(gap[main]) >= 1.6 * abs(gap[1 - main]):
                yield SceneItem("relation", (*names, time), SIDES[main][int(gap[main] > 0)])
            for axis in (0, 1):
                if abs(gap[axis]) >= 10:
                    side = int(rng.integers(2))
                    word = SIDES[axis][side] + (" of" if axis == 0 else "")
                    yes = "yes" if side == int(gap[axis] > 0) else "no"
                    yield SceneItem("compare", (*names, time, word), yes)


def born(table: Table, thing: int) -> int:
    """Second in which a thing appears: its first frame among those the model is shown."""
    return int(table.alive[thing].argmax())


def gone(table: Table, thing: int) -> int:
    """Second from which on a thing is no longer there."""
    return int(np.flatnonzero(table.alive[thing])[-1]) + 1


def _when(table: Table) -> Iterator[SceneItem]:
    for i in range(table.count):
        second = born(table, i)
        if second and table.clear(i)[second]:
            yield SceneItem("when", (table.name(i),), str(second))
    if table.shown.sum() >= 2:
        yield SceneItem("when", ("number",), str(int(table.shown.argmax())))


def _opening(view: SceneView, count: int) -> str:
    many = "is one object" if count == 1 else f"are {count} objects"
    return f"there {many if count else 'are no objects'} on a {view.look.background} background."


def describe_clip(view: SceneView, table: Table, ways: dict[str, str]) -> str:
    """Description of a clip: things in the order in which they appear, from the left."""
    parts = [_opening(view, table.count)]
    order = sorted(
        range(table.count), key=lambda i: (born(table, i), table.place[i, born(table, i), 0])
    )
    for i in order:
        come, leave = born(table, i), gone(table, i)
        begins = f"appears at second {come}" if come else "is there from the start"
        ends = f"leaves at second {leave}" if leave < SAMPLED else "stays until the end"
        name = table.name(i)
        parts.append(f"the {name} moves {ways[name]}, {begins} and {ends}.")
    if table.number < 0 or not table.shown.any():
        return " ".join([*parts, "no number is shown."])
    parts.append(f"the number {table.number} appears at second {int(table.shown.argmax())}.")
    return " ".join(parts)


def describe_picture(view: SceneView, table: Table, frame: int, there: Iterable[int]) -> str:
    """Description of a frame: things from the left."""
    order = sorted(there, key=lambda i: table.place[i, frame, 0])
    parts = [_opening(view, len(order))]
    for i in order:
        where = place_of(table.place[i, frame].astype(np.float64))
        parts.append(f"the {table.name(i)} is in the {where}.")
    number = f"the number {table.number} is shown." if table.shown[frame] else "no number is shown."
    return " ".join([*parts, number])


def _followups(items: Sequence[SceneItem], ways: dict[str, str]) -> Iterator[SceneItem]:
    """Second turns: what "it" is, or which question is asked again, is in the first."""
    colours = {item.slots[0]: item.answer for item in items if item.kind == "colour"}
    for item in items:
        if item.kind == "exists" and item.slots[0] in colours and item.answer == "yes":
            yield SceneItem("followup", (), colours[item.slots[0]], "its_colour", item)
        if item.kind == "shape" and (name := f"{item.slots[0]} {item.answer}") in ways:
            yield SceneItem("followup", (), ways[name], "its_way", item)
    for kind in ("direction", "position", "when"):
        alike = [item for item in items if item.kind == kind]
        for one, two in pairwise(alike):
            if one.slots[1:] == two.slots[1:] and one.slots[0] != two.slots[0]:
                yield SceneItem("followup", two.slots[:1], two.answer, "again", one)
