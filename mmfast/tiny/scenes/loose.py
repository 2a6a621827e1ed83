"""Items put as people put them, from those that name every thing in full."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from mmfast.tiny.scenes.looks import SceneView
from mmfast.tiny.scenes.questions import (
    ALONE,
    ATTRIBUTE,
    MOVES,
    NOUNS,
    PART,
    SAID,
    SHORT,
    STILL,
    WHICH,
    SceneItem,
    drawn,
    plural,
)
from mmfast.tiny.scenes.sayings import CLAUSES
from mmfast.tiny.video.questions import Look
from mmfast.tiny.video.scene import COLOURS, DIRECTIONS, SHAPES

NUMERALS = ("no", "one", "two", "three", "four", "five")


def loose_items(
    view: SceneView,
    items: Sequence[SceneItem],
    looks: Sequence[Look],
    times: Sequence[str],
    whole: bool,
) -> list[SceneItem]:
    """Items about the same medium, on which there are things of `looks`.

    `whole` tells that each of them can be seen well; `times` are those at which a place is asked.
    """
    ways = {item.slots[0]: item.answer for item in items if item.kind == "direction"}
    found = list[SceneItem]()
    if whole:
        found += _alone(items, len(looks), times)
    found += _moves(view, ways)
    found += _short(view, [*items, *found], looks)
    if whole:
        found += [*_attributes(view, looks), *_parts(view, looks)]
        found += _which(view, items, looks, times, ways)
    return [*found, *_said([*items, *found])]


def _said(items: Sequence[SceneItem]) -> Iterator[SceneItem]:
    """The same questions as clauses behind what people say first."""
    for item in items:
        form = item.form or item.kind
        if form in CLAUSES and item.before is None:
            yield SceneItem(SAID, item.slots, item.answer, form)


def _alone(items: Sequence[SceneItem], many: int, times: Sequence[str]) -> Iterator[SceneItem]:
    """Questions about "the object" or "it"; they say so where it is none or several."""
    rows = {"colour": "it_colour", "shape": "it_shape", "position": "it_place", "where": "it_box"}
    if STILL not in times:
        rows |= {"direction": "it_way"}
    several = f"there are {many} objects." if many else "there is no object."
    for kind, it in rows.items():
        known = [item for item in items if item.kind == kind]
        for time in times if kind in ("position", "where") else ("",):
            mine = (item.answer for item in known if time in ("", *item.slots[1:]))
            answer = next(mine, None) if many == 1 else several
            if answer is None:
                continue
            if kind != "shape":
                yield from (SceneItem(ALONE, (noun, time), answer, kind) for noun in NOUNS)
            yield from [SceneItem(ALONE, ("", time), answer, it)] * 2  # the nouns are four


def _moves(view: SceneView, ways: dict[str, str]) -> Iterator[SceneItem]:
    """For each thing that moves one way, whether it moves that way, and whether another."""
    rng = np.random.default_rng([view.look.seed, 11])
    for name, way in ways.items():
        (other,) = drawn(rng, [w for w in DIRECTIONS if w != way], 1)
        for word, answer in ((way, "yes"), (other, "no")):
            yield SceneItem(MOVES, (name, _towards(rng, word)), answer, "moves")


def _towards(rng: np.random.Generator, way: str) -> str:
    """A way, left and right now and then as "to the left"."""
    return f"to the {way}" if way in ("left", "right") and rng.random() < 0.5 else way


_NAMED = ("direction", "position", "where", "when", "speed", "first", "relation", "compare", MOVES)


def _short(
    view: SceneView, items: Sequence[SceneItem], looks: Sequence[Look]
) -> Iterator[SceneItem]:
    """The same questions with a shape or colour alone, where no other thing has it."""
    rng = np.random.default_rng([view.look.seed, 13])
    shapes, colours = ([look[k] for look in looks] for k in (0, 1))
    short = dict[str, list[str]]()
    for shape, colour in looks:
        names = [shape] if shapes.count(shape) == 1 else []
        if colours.count(colour) == 1:
            names += [f"{colour} object", f"{colour} thing"]
        short[f"{colour} {shape}"] = names
    for item in items:
        if item.kind in _NAMED and any(short.get(slot) for slot in item.slots):
            chosen = (drawn(rng, short.get(slot, ()), 1) or [slot] for slot in item.slots)
            slots = tuple(name for (name,) in chosen)
            yield SceneItem(SHORT, slots, item.answer, item.form or item.kind)


def _attributes(view: SceneView, looks: Sequence[Look]) -> Iterator[SceneItem]:
    """Yes or no: the colour of a shape, the shape of a colour, any thing so, so many things."""
    rng = np.random.default_rng([view.look.seed, 17])
    shapes, colours = ([look[k] for look in looks] for k in (0, 1))
    inks = tuple(COLOURS)
    by_shape = shapes, SHAPES, "", colours, inks, ""
    by_colour = colours, inks, " object", shapes, SHAPES, "a "
    for names, every, noun, truths, options, article in (by_shape, by_colour):
        for name in dict.fromkeys(names):
            if names.count(name) == 1:
                truth = truths[names.index(name)]
                yield from _yes_and_no(rng, f"the {name}{noun}", truth, truths, options, article)
        for name in drawn(rng, [name for name in every if name not in names], 1):
            (word,) = drawn(rng, options, 1)
            missing = f"there is no {name}{noun}."
            yield SceneItem(ATTRIBUTE, (f"the {name}{noun}", article + word), missing)
        for subject in ("it", *(f"the {noun}" for noun in drawn(rng, NOUNS, 1))):
            if len(looks) == 1:
                yield from _yes_and_no(rng, subject, truths[0], truths, options, article)
            else:
                many = f"there are {len(looks)} objects." if looks else "there is no object."
                (word,) = drawn(rng, options, 1)
                yield SceneItem(ATTRIBUTE, (subject, article + word), many)
    here, gone = [*dict.fromkeys(colours)], [c for c in COLOURS if c not in colours]
    for words, answer in ((here, "yes"), (gone, "no")):
        for word in drawn(rng, words, 1):
            yield SceneItem(ATTRIBUTE, (word,), answer, "anything")
    yield from _amounts(rng, len(looks))


def _yes_and_no(
    rng: np.random.Generator,
    subject: str,
    truth: str,
    others: Sequence[str],
    options: Sequence[str],
    article: str,
) -> Iterator[SceneItem]:
    """A question that is so, and one that is so of another thing there is, or of none."""
    near = [word for word in dict.fromkeys(others) if word != truth]
    far = [word for word in options if word != truth]
    (wrong,) = drawn(rng, near if near and rng.random() < 0.5 else far, 1)
    yield SceneItem(ATTRIBUTE, (subject, article + truth), "yes")
    yield SceneItem(ATTRIBUTE, (subject, article + wrong), "no")


def _amounts(rng: np.random.Generator, many: int) -> Iterator[SceneItem]:
    """Yes or no: so many things, some other number of them, more than one."""
    other = int(rng.choice([n for n in range(1, len(NUMERALS)) if n != many]))
    for number, answer in ((many, "yes"), (other, "no")):
        (noun,) = drawn(rng, NOUNS, 1)
        if not number:
            continue
        word = NUMERALS[number] if rng.random() < 0.6 else str(number)
        only = ("only ", "just ", "exactly ", "")[int(rng.integers(3 if number == 1 else 4))]
        verb, ending = ("is", "") if number == 1 else ("are", "s")
        yield SceneItem(ATTRIBUTE, (verb, f"{only}{word} {noun}{ending}"), answer, "amount")
    (noun,) = drawn(rng, NOUNS, 1)
    more = "yes" if many > 1 else "no"
    yield SceneItem(ATTRIBUTE, ("is", f"more than one {noun}"), more, "amount")


def _parts(view: SceneView, looks: Sequence[Look]) -> Iterator[SceneItem]:
    """Counts of a shape, of a colour, and of a thing, some of them none."""
    rng = np.random.default_rng([view.look.seed, 19])
    full = [f"{colour} {shape}" for shape, colour in looks]
    shapes, colours = ([look[k] for look in looks] for k in (0, 1))
    every = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]
    for names, options in ((shapes, SHAPES), (colours, tuple(COLOURS)), (full, every)):
        here = [*dict.fromkeys(names)]
        some = here if len(names) < 2 or options == every else [*here, *here]
        for name in (*some, *drawn(rng, [n for n in options if n not in here], 1)):
            noun = f"{name} {drawn(rng, NOUNS, 1)[0]}" if name in COLOURS else name
            yield SceneItem(PART, (plural(noun),), str(names.count(name)))


def _which(
    view: SceneView,
    items: Sequence[SceneItem],
    looks: Sequence[Look],
    times: Sequence[str],
    ways: dict[str, str],
) -> Iterator[SceneItem]:
    """The thing that moves some way or lies in some corner, where it is the only one."""
    rng = np.random.default_rng([view.look.seed, 23])
    for name, way in _single(ways, looks):
        where = _towards(rng, way)
        verb = drawn(rng, ("moves", "goes", "is moving", "is going"), 1)[0]
        yield SceneItem(WHICH, (f"{verb} {where}",), name)
    for time in times:
        places = {item.slots[0]: item.answer for item in items
                  if item.kind == "position" and item.slots[1] == time}  # fmt: skip
        for name, place in _single(places, looks):
            verb = drawn(rng, ("is", "lies", "is found"), 1)[0]
            yield SceneItem(WHICH, (f"{verb} in the {place}{time}",), name)


def _single(known: Mapping[str, str], looks: Sequence[Look]) -> Iterator[tuple[str, str]]:
    """Things and what is known of them, where it is known of all, and of no other the same."""
    if len(known) == len(looks):
        answers = [*known.values()]
        yield from (pair for pair in known.items() if answers.count(pair[1]) == 1)
