"""Places of the endless world: things that move for ever in a picture, drawn at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mmfast.tiny.pages import arrange
from mmfast.tiny.questions import Fact
from mmfast.tiny.render import MARGIN, PIXELS, SCALE, Bytes, ground, paint, paint_panel
from mmfast.tiny.scene import BOX, SIDE, Floats, Panel, Thing

Name = tuple[str, str]  # colour, shape


@dataclass(frozen=True)
class Place:
    """A scene without an end; a thing is at `start + velocity * age`, reflected by the edges."""

    things: tuple[Thing, ...]
    panel: Panel | None
    texture: int
    since: float  # seconds of the stream at which its age is 0


@dataclass(frozen=True)
class Moment:
    """A place at a time."""

    place: Place
    frame: Bytes  # [96, 96, 3]
    centres: Floats  # [things, 2] in units of the picture
    seen: Floats  # [things] share of each that nothing hides


def ordinary_place(rng: np.random.Generator, names: Sequence[Name], since: float) -> Place:
    """Things of the given names on the move, sometimes with a number that belongs to nothing."""
    things = tuple(_mover(rng, name) for name in names)
    panel = None
    if rng.random() < 0.25:
        corner = (int(rng.integers(0, 5)) * 16, int(rng.integers(0, 10)) * 8)
        panel = Panel(int(rng.integers(10, 100)), corner, 0, 1)
    return Place(things, panel, int(rng.integers(2**31)), since)


def fact_place(
    rng: np.random.Generator, name: Name, number: int, other: Name | None, since: float
) -> tuple[Place, str]:
    """A still thing in a corner with a number beside it, perhaps another thing away from both."""
    while True:
        radius = float(rng.uniform(9.0, 11.5))
        centre, corner = arrange(rng, radius)
        if min(abs(centre[0] - SIDE / 2), abs(centre[1] - SIDE / 2)) >= 10:
            break
    things = [Thing(name[1], name[0], radius, centre, (0.0, 0.0), 0, 1)]
    if other is not None:
        panel = np.array(corner) + np.array(BOX) / 2
        while True:
            bystander = _mover(rng, other)
            gap = np.array(bystander.start) - np.array([centre, tuple(panel)])
            if np.hypot(*gap.T).min() > 34:
                break
        things.append(replace(bystander, velocity=(0.0, 0.0)))
    place = Place(tuple(things), Panel(number, corner, 0, 1), int(rng.integers(2**31)), since)
    return place, corner_of(*centre)


def corner_of(x: float, y: float) -> str:
    """Such as "top left"."""
    return f"{'top' if y < SIDE / 2 else 'bottom'} {'left' if x < SIDE / 2 else 'right'}"


def show(place: Place, time: float) -> Moment:
    """Draw a place at a time in seconds of the stream."""
    age = time - place.since
    rng = np.random.default_rng([place.texture, round(abs(age) * 1000)])
    shift = np.clip(rng.normal(0.0, 0.8, 2), -1.5, 1.5)
    dx, dy = (MARGIN - np.round(shift * SCALE)).astype(int)
    picture = _ground(place.texture)[dy : dy + PIXELS, dx : dx + PIXELS].copy()
    owner = np.zeros((PIXELS, PIXELS), np.uint8)
    centres = np.array([_centre(thing, age) for thing in place.things]) + shift
    whole = [
        paint(picture, owner, thing, i, centres[i] * SCALE) for i, thing in enumerate(place.things)
    ]
    if place.panel is not None:
        paint_panel(picture, owner, place.panel)
    seen = [(owner == i + 1).sum() / max(size, 1) for i, size in enumerate(whole)]
    # Half the size, as a camera would average: [96, 2, 96, 2, 3] -> [96, 96, 3].
    small = picture.reshape(int(SIDE), 2, int(SIDE), 2, 3).mean((1, 3))
    return Moment(place, np.clip(small, 0, 255).astype(np.uint8), centres, np.array(seen))


def present_facts(moment: Moment) -> list[Fact]:
    """What can be asked about a moment without ambiguity while it is on screen."""
    things, found = moment.place.things, []
    clear = [i for i, share in enumerate(moment.seen) if share >= 0.6]
    for i in clear:
        thing = things[i]
        if sum(other.shape == thing.shape for other in things) == 1:
            found.append(Fact("colour", (thing.shape,), thing.colour))
        if sum(other.colour == thing.colour for other in things) == 1:
            found.append(Fact("shape", (thing.colour,), thing.shape))
        x, y = moment.centres[i]
        if min(abs(x - SIDE / 2), abs(y - SIDE / 2)) >= 7:
            found.append(Fact("position", (thing.name,), corner_of(x, y)))
    if len(clear) == len(things):
        found.append(Fact("count", (), str(len(things))))
    if moment.place.panel is not None:
        found.append(Fact("number", (), str(moment.place.panel.number)))
    return found


@lru_cache(4)
def _ground(texture: int) -> Floats:
    return ground(np.random.default_rng(texture))


def _mover(rng: np.random.Generator, name: Name) -> Thing:
    radius = float(rng.uniform(9.0, 11.5))
    low, high = radius + 2, SIDE - radius - 2
    start = (float(rng.uniform(low, high)), float(rng.uniform(low, high)))
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(2.0, 8.0)  # units per second
    velocity = (float(speed * np.cos(angle)), float(speed * np.sin(angle)))
    return Thing(name[1], name[0], radius, start, velocity, 0, 1)


def _centre(thing: Thing, age: float) -> Floats:
    """Straight on, reflected at the edges: a triangle wave, exact at any age."""
    low = thing.radius + 2
    span = SIDE - 2 * low
    way = (np.asarray(thing.start) - low + np.asarray(thing.velocity) * age) % (2 * span)
    return np.asarray(low + np.minimum(way, 2 * span - way))
