"""An endless video for the embedded stream model: drawn from a seed, any moment at any time.

Ordinary scenes of moving things follow each other in hard cuts, 10 to 60 seconds apart. Now and
then, for a few seconds, a fact is shown: a thing of a name that no other moment of the stream
has, in a corner, with a two-digit number beside it. Nothing is stored: every moment is computed
from the seed, so hours cost no more memory than seconds.

There are 30 names (a colour and a shape); a stream keeps `FACTS` of them for its facts and uses
the others in its scenes, so a stream has at most `FACTS` facts. How far they lie apart is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from mmfast.core.errors import MmfastError
from mmfast.tiny.render import Bytes
from mmfast.tiny.scene import COLOURS, EVAL, SHAPES
from mmfast.tiny.video_io import write
from mmfast.tiny.world_scene import Moment, Place, fact_place, ordinary_place, show

FACTS = 20  # names kept for facts; the other ten are those of the ordinary scenes
NAMES = tuple((colour, shape) for colour in COLOURS for shape in SHAPES)
MINUTE = 60.0  # scenes never cross a full minute, so that any of them is found at once
SHORTEST = 10.0  # seconds of an ordinary scene
CLOSEST = 12.0  # seconds from fact to fact


@dataclass(frozen=True)
class Event:
    """A fact: on screen from `start` until before `stop`, in seconds."""

    number: int
    name: str
    corner: str
    start: float
    stop: float
    place: Place


@dataclass(frozen=True)
class World:
    """One endless stream.

    Args:
        seed: Which one.
        every: Seconds from fact to fact, one in each such span, at least CLOSEST.
        facts: How many there are, at most FACTS; scenes go on without them after that.
        purpose: Streams of different purposes never meet.

    Raises:
        MmfastError: More facts than names, or no room for one.
    """

    seed: int = 0
    every: float = 150.0
    facts: int = FACTS
    purpose: int = EVAL

    def __post_init__(self) -> None:
        if not 0 <= self.facts <= FACTS:
            raise MmfastError(f"facts={self.facts} is not in 0 to {FACTS}, the names kept for them")
        if not self.every >= CLOSEST:
            raise MmfastError(
                f"every={self.every} leaves no room for a fact; give {CLOSEST:g} or more"
            )

    def event(self, number: int) -> Event:
        """Fact number 0 to `facts - 1`.

        Raises:
            MmfastError: There is no such fact.
        """
        if not 0 <= number < self.facts:
            raise MmfastError(f"fact {number} is not in 0 to {self.facts - 1} of this world")
        return _event(self, number)

    def events(self, until: float = float("inf")) -> list[Event]:
        """Facts that began before `until`, in order."""
        found = (self.event(i) for i in range(self.facts))
        return [event for event in found if event.start < until]

    def event_at(self, time: float) -> Event | None:
        """The fact on screen at a time."""
        slot = int(time // self.every)
        if not 0 <= slot < self.facts:
            return None
        event = self.event(slot)
        return event if event.start <= time < event.stop else None

    def place_at(self, time: float) -> Place:
        """What is on screen around a time: a fact, or the ordinary scene."""
        event = self.event_at(time)
        return event.place if event is not None else _ordinary(self, *_cut(self, time))

    def at(self, time: float) -> Moment:
        """The picture at a time in seconds, and what is where in it."""
        return show(self.place_at(time), time)

    def frame(self, time: float) -> Bytes:
        """The picture at a time: uint8 [96, 96, 3]."""
        return self.at(time).frame

    def frames(
        self, seconds: float = float("inf"), fps: float = 1.0, start: float = 0.0
    ) -> Iterator[tuple[Bytes, float]]:
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
def _event(world: World, number: int) -> Event:
    rng = np.random.default_rng([world.purpose, world.seed, 21, number])
    reserved, ordinary, numbers = _names(world)
    length = float(rng.uniform(4, 6))
    start = number * world.every + float(rng.uniform(2, world.every - length - 2))
    name = NAMES[reserved[number]]
    other = NAMES[ordinary[rng.integers(len(ordinary))]] if rng.random() < 0.4 else None
    place, corner = fact_place(rng, name, numbers[number], other, start)
    return Event(numbers[number], " ".join(name), corner, start, start + length, place)


@lru_cache(64)
def _cuts(world: World, minute: int) -> tuple[float, ...]:
    """Where scenes of a minute begin, in seconds from its start."""
    rng = np.random.default_rng([world.purpose, world.seed, 22, minute])
    count = int(rng.integers(1, 5))
    spare = rng.dirichlet(np.ones(count)) * (MINUTE - SHORTEST * count)
    return (0.0, *(float(v) for v in np.cumsum(SHORTEST + spare)[:-1]))


def _cut(world: World, time: float) -> tuple[int, int]:
    """Minute, and number in it, of the ordinary scene at a time."""
    minute = int(time // MINUTE)
    cuts = _cuts(world, minute)
    return minute, max(i for i, cut in enumerate(cuts) if cut <= time - minute * MINUTE)


@lru_cache(8)
def _ordinary(world: World, minute: int, which: int) -> Place:
    rng = np.random.default_rng([world.purpose, world.seed, 23, minute, which])
    _, ordinary, _ = _names(world)
    count = int(rng.integers(1, 4))
    chosen = [NAMES[ordinary[i]] for i in rng.choice(len(ordinary), count, replace=False)]
    return ordinary_place(rng, chosen, minute * MINUTE + _cuts(world, minute)[which])
