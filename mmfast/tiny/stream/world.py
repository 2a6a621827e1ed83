"""An endless video for the embedded stream model, drawn from a seed, at any moment of its time.

Ordinary scenes of moving things follow each other in hard cuts, 10 to 60 seconds apart. Now and
then, for a few seconds, a fact is shown: a thing of a name (colour and shape) that no other moment
has, in a corner, with a two-digit number beside it. Every moment is computed from the seed alone.

`python -m mmfast.tiny.stream.world world.mp4` writes the beginning of a world as a file, and beside
it the questions that can be asked at its end, one JSON line each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from mmfast.core.errors import MmfastError
from mmfast.tiny import training
from mmfast.tiny.document.pages import arrange
from mmfast.tiny.video import scene
from mmfast.tiny.video.clips import write
from mmfast.tiny.video.questions import Fact, parse_grammar, picture_facts

Name = tuple[str, str]  # colour, shape


@dataclass(frozen=True)
class EndlessScene:
    """A scene without an end; a thing is at `start + velocity * age`, reflected by the edges."""

    things: tuple[scene.Thing, ...]
    panel: scene.Panel | None
    texture: int
    since: float  # seconds of the stream at which its age is 0

    def centre(self, thing: scene.Thing, time: float) -> scene.Floats:
        """Return the centre of a thing at a time: a triangle wave, exact at any age."""
        low = thing.radius + 2
        span = scene.SIDE - 2 * low
        way = np.asarray(thing.velocity) * (time - self.since)
        way = (np.asarray(thing.start) - low + way) % (2 * span)
        return np.asarray(low + np.minimum(way, 2 * span - way))


@dataclass(frozen=True)
class Moment:
    """A place at a time."""

    place: EndlessScene
    frame: scene.Bytes  # [96, 96, 3]
    centres: scene.Floats  # [things, 2] in units of the picture
    seen: scene.Floats  # [things] share of each that nothing hides


def ordinary_place(rng: np.random.Generator, names: Sequence[Name], since: float) -> EndlessScene:
    """Things of the given names on the move, sometimes with a number that belongs to nothing."""
    things = tuple(_mover(rng, name) for name in names)
    panel = None
    if rng.random() < 0.25:
        corner = (int(rng.integers(0, 5)) * 16, int(rng.integers(0, 10)) * 8)
        panel = scene.Panel(int(rng.integers(10, 100)), corner, 0, 1)
    return EndlessScene(things, panel, int(rng.integers(2**31)), since)


def fact_place(
    rng: np.random.Generator, name: Name, number: int, other: Name | None, since: float
) -> tuple[EndlessScene, str]:
    """A still thing in a corner with a number beside it, perhaps another thing away from both."""
    while True:
        radius = float(rng.uniform(9.0, 11.5))
        centre, corner = arrange(rng, radius)
        if min(abs(centre[0] - scene.SIDE / 2), abs(centre[1] - scene.SIDE / 2)) >= 10:
            break
    things = [scene.Thing(name[1], name[0], radius, centre, (0.0, 0.0), 0, 1)]
    if other is not None:
        panel = np.array(corner) + np.array(scene.BOX) / 2
        while True:
            bystander = _mover(rng, other)
            gap = np.array(bystander.start) - np.array([centre, tuple(panel)])
            if np.hypot(*gap.T).min() > 34:
                break
        things.append(replace(bystander, velocity=(0.0, 0.0)))
    place = EndlessScene(
        tuple(things), scene.Panel(number, corner, 0, 1), int(rng.integers(2**31)), since
    )
    return place, scene.corner_of(centre)


def show(place: EndlessScene, time: float) -> Moment:
    """Draw a place at a time in seconds of the stream."""
    age = time - place.since
    rng = np.random.default_rng([place.texture, round(abs(age) * 1000)])
    shift = np.clip(rng.normal(0.0, 0.8, 2), -1.5, 1.5)
    dx, dy = (scene.MARGIN - np.round(shift * scene.SCALE)).astype(int)
    picture = _ground(place.texture)[dy : dy + scene.PIXELS, dx : dx + scene.PIXELS].copy()
    owner = np.zeros((scene.PIXELS, scene.PIXELS), np.uint8)
    centres = np.array([place.centre(thing, time) for thing in place.things]) + shift
    whole = [
        scene.paint(picture, owner, thing, i, centres[i] * scene.SCALE)
        for i, thing in enumerate(place.things)
    ]
    if place.panel is not None:
        scene.paint_panel(picture, owner, place.panel)
    seen = [(owner == i + 1).sum() / max(size, 1) for i, size in enumerate(whole)]
    # Half the size, as a camera would average: [96, 2, 96, 2, 3] -> [96, 96, 3].
    small = picture.reshape(int(scene.SIDE), 2, int(scene.SIDE), 2, 3).mean((1, 3))
    return Moment(place, np.clip(small, 0, 255).astype(np.uint8), centres, np.array(seen))


def present_facts(moment: Moment) -> list[Fact]:
    """Facts about a moment that can be asked without ambiguity while it is on screen."""
    looks, panel = [(each.shape, each.colour) for each in moment.place.things], moment.place.panel
    number = None if panel is None else panel.number
    return list(picture_facts(looks, moment.centres, moment.seen, number))


@lru_cache(4)
def _ground(texture: int) -> scene.Floats:
    return scene.ground(np.random.default_rng(texture))


def _mover(rng: np.random.Generator, name: Name) -> scene.Thing:
    radius = float(rng.uniform(9.0, 11.5))
    low, high = radius + 2, scene.SIDE - radius - 2
    start = (float(rng.uniform(low, high)), float(rng.uniform(low, high)))
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(2.0, 8.0)  # units per second
    velocity = (float(speed * np.cos(angle)), float(speed * np.sin(angle)))
    return scene.Thing(name[1], name[0], radius, start, velocity, 0, 1)


FACTS = 20  # names kept for facts; the other ten are those of the ordinary scenes
NAMES = tuple((colour, shape) for colour in scene.COLOURS for shape in scene.SHAPES)
MINUTE = 60.0  # scenes never cross a full minute, so that any of them is found at once
SHORTEST = 10.0  # seconds of an ordinary scene
CLOSEST, FURTHEST = 12.0, 1e9  # seconds from fact to fact


@dataclass(frozen=True)
class WorldEvent:
    """A fact: on screen from `start` until before `stop`, in seconds."""

    number: int
    name: str
    corner: str
    start: float
    stop: float
    place: EndlessScene


@dataclass(frozen=True)
class World:
    """One endless stream.

    Args:
        seed: Seed of the stream.
        every: Seconds from fact to fact, one in each such span, CLOSEST to FURTHEST.
        facts: Number of facts, at most FACTS; afterwards scenes follow without them.
        purpose: Streams of different purposes never meet.

    Raises:
        MmfastError: More facts than names, or no room for one.
    """

    seed: int = 0
    every: float = 150.0
    facts: int = FACTS
    purpose: int = scene.EVAL

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kinds = Real if name == "every" else Integral
            if not isinstance(value, kinds) or value < 0:
                raise MmfastError(f"{name}={value!r} is not allowed; give a number from 0")
        if not 0 <= self.facts <= FACTS:
            raise MmfastError(f"facts={self.facts} is not in 0 to {FACTS}, the names kept for them")
        if not CLOSEST <= self.every <= FURTHEST:
            raise MmfastError(
                f"every={self.every:g} leaves no room for a fact, or none is ever seen; give "
                f"{CLOSEST:g} to {FURTHEST:g} seconds"
            )

    def event(self, number: int) -> WorldEvent:
        """Fact number 0 to `facts - 1`."""
        if not 0 <= number < self.facts:
            raise MmfastError(f"fact {number} is not in 0 to {self.facts - 1} of this world")
        return _event(self, number)

    def events(self, until: float = float("inf")) -> list[WorldEvent]:
        """Facts that began before `until`, in order."""
        found = (self.event(i) for i in range(self.facts))
        return [event for event in found if event.start < until]

    def event_at(self, time: float) -> WorldEvent | None:
        """The fact on screen at a time."""
        slot = int(time // self.every)
        if not 0 <= slot < self.facts:
            return None
        event = self.event(slot)
        return event if event.start <= time < event.stop else None

    def place_at(self, time: Any) -> EndlessScene:
        """Scene on screen at a time: a fact, or the ordinary scene."""
        seconds = float(time) if isinstance(time, Real) else -1.0
        if not 0 <= seconds < float("inf"):
            raise MmfastError(f"time={time!r} is no moment of a world; give seconds from 0")
        event = self.event_at(seconds)
        return event.place if event is not None else _ordinary(self, *_cut(self, seconds))

    def at(self, time: float) -> Moment:
        """The picture at a time in seconds, and the things in it."""
        return show(self.place_at(time), time)

    def frame(self, time: float) -> scene.Bytes:
        """The picture at a time: uint8 [96, 96, 3]."""
        return self.at(time).frame

    def frames(
        self, seconds: float = float("inf"), fps: float = 1.0, start: float = 0.0
    ) -> Iterator[tuple[scene.Bytes, float]]:
        """Pictures [96, 96, 3] and their times, from `start` to before `start + seconds`."""
        number = 0
        while number / fps < seconds:
            time = start + number / fps
            yield self.frame(time), time
            number += 1

    def save(self, path: str | Path, seconds: float, fps: int = 1) -> None:
        """Write the beginning as an H.264 mp4."""
        write(Path(path), (frame for frame, _ in self.frames(seconds, fps)), fps)


@lru_cache(4)
def _names(world: World) -> tuple[list[int], list[int], list[int]]:
    """Names of facts in order, names of ordinary scenes, numbers of facts."""
    rng = np.random.default_rng([world.purpose, world.seed, 20])
    order = rng.permutation(len(NAMES)).tolist()
    return order[:FACTS], order[FACTS:], (rng.permutation(90)[:FACTS] + 10).tolist()


@lru_cache(64)
def _event(world: World, number: int) -> WorldEvent:
    rng = np.random.default_rng([world.purpose, world.seed, 21, number])
    reserved, ordinary, numbers = _names(world)
    length = float(rng.uniform(4, 6))
    start = number * world.every + float(rng.uniform(2, world.every - length - 2))
    name = NAMES[reserved[number]]
    other = NAMES[ordinary[rng.integers(len(ordinary))]] if rng.random() < 0.4 else None
    place, corner = fact_place(rng, name, numbers[number], other, start)
    return WorldEvent(numbers[number], " ".join(name), corner, start, start + length, place)


@lru_cache(64)
def _cuts(world: World, minute: int) -> tuple[float, ...]:
    """Starts of the scenes of a minute, in seconds from its start."""
    rng = np.random.default_rng([world.purpose, world.seed, 22, minute])
    count = int(rng.integers(1, 5))
    spare = rng.dirichlet(np.ones(count)) * (MINUTE - SHORTEST * count)
    return (0.0, *(float(v) for v in np.cumsum(SHORTEST + spare)[:-1]))


def _cut(world: World, time: float) -> tuple[int, int]:
    minute = int(time // MINUTE)
    cuts = _cuts(world, minute)
    return minute, max(i for i, cut in enumerate(cuts) if cut <= time - minute * MINUTE)


@lru_cache(8)
def _ordinary(world: World, minute: int, which: int) -> EndlessScene:
    rng = np.random.default_rng([world.purpose, world.seed, 23, minute, which])
    _, ordinary, _ = _names(world)
    count = int(rng.integers(1, 4))
    chosen = [NAMES[ordinary[i]] for i in rng.choice(len(ordinary), count, replace=False)]
    return ordinary_place(rng, chosen, minute * MINUTE + _cuts(world, minute)[which])


# Kinds of question about the present, by the kind of what is on screen.
NOW = {name: f"{name} now" for name in ("colour", "shape", "position", "count", "number")}
PAST = ("entry", "corner")
KINDS = (*PAST, *NOW.values())

PAST_WORDINGS = parse_grammar("""
entry = What number is at the {0}? | Which number is at the {0}?
corner = In which corner is the {0}? | Where is the {0}?
""")
NOW_WORDINGS = parse_grammar("""
colour = What colour is the {0} now? | Which colour does the {0} have now?
shape = What shape is the {0} object now? | Which shape does the {0} object have now?
position = Where is the {0} now? | In which corner is the {0} now?
count = How many objects are there now? | How many shapes can you see now?
number = What number is on the screen now? | Which number is shown now?
""")


@dataclass(frozen=True)
class WorldQuestion:
    """A question with one right answer at the moment it is asked."""

    kind: str  # one of KINDS
    text: str  # the question
    answer: str  # the right answer
    asked: float  # time of the question, in seconds
    shown: float  # time at which its subject was last on screen; `asked` for the present

    @property
    def age(self) -> float:
        """Seconds since the answer could last be seen."""
        return self.asked - self.shown


def present_questions(world: World, time: float) -> list[WorldQuestion]:
    """Questions about what is on screen at a time."""
    found = present_facts(world.at(time))
    return [
        WorldQuestion(NOW[fact.kind], fact.ask(i, NOW_WORDINGS), fact.answer, time, time)
        for i, fact in enumerate(found)
    ]


def past_questions(world: World, time: float) -> list[WorldQuestion]:
    """Questions about the facts shown until a time, oldest first; their answers hold for ever."""
    found = []
    for i, event in enumerate(world.events(time)):
        for fact in event_facts(event.name, event.number, event.corner):
            text, shown = fact.ask(i, PAST_WORDINGS), min(event.stop, time)
            found.append(WorldQuestion(fact.kind, text, fact.answer, time, shown))
    return found


def event_facts(name: str, number: int, corner: str) -> list[Fact]:
    """Facts about a thing of the past: the number beside it, and its corner."""
    return [Fact("entry", (name,), str(number)), Fact("corner", (name,), corner)]


@training.one_line
def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = training.RecipeParser(__doc__)
    parser.add_argument("path", type=Path, help="mp4 to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--fps", type=int, default=1)
    parser.add_argument("--every", type=float, help="seconds from fact to fact; 20 facts if absent")
    options = parser.parse_args(argv)
    every = options.seconds / FACTS if options.every is None else options.every
    try:
        world = World(options.seed, every=every)
        world.save(options.path, options.seconds, options.fps)
    except MmfastError as error:
        parser.error(str(error))
    last = (options.seconds * options.fps - 1) // 1 / options.fps
    asked = [*past_questions(world, last), *present_questions(world, last)]
    lines = "".join(json.dumps({**asdict(q), "age": q.age}) + "\n" for q in asked)
    options.path.with_suffix(".jsonl").write_text(lines, encoding="utf-8")
    print(f"{options.path.name}: {len(asked)} questions beside it", file=sys.stderr)


if __name__ == "__main__":
    main()
