"""The world of the embedded video model: who moves where, drawn from a seed, without pixels.

Lengths are in units of a 96 x 96 picture whatever the size of the file; time is in frames.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

SIDE = 96.0  # the unit picture
FRAMES = 16  # frames in a clip
SAMPLED = 8  # frames the model is shown
FPS = 8
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 40),
    "green": (50, 190, 60),
    "blue": (50, 90, 235),
    "yellow": (235, 215, 50),
    "purple": (180, 60, 210),
    "white": (240, 240, 240),
}
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "up": (0.0, -1.0),
    "down": (0.0, 1.0),
}
SPEEDS = ((1.5, 2.0), (3.4, 4.4))  # slow and fast, per frame; nothing in between, so order is clear
BOX = (32, 24)  # width and height of the number's panel
COUNTS = (0.16, 0.26, 0.3, 0.28)  # shares of clips with 1 to 4 things
TRAIN, EVAL, CLIPS = 0, 1, 2  # seeds of different purposes never meet

Floats = NDArray[np.float64]


def sampled_indices(total: int, count: int = SAMPLED) -> NDArray[np.int64]:
    """Frames that uniform sampling shows: `count` of `total`, both ends included."""
    return np.round(np.linspace(0, total - 1, count)).astype(np.int64)


@dataclass(frozen=True)
class Thing:
    """One moving object: alive in frames [born, gone), at `start + velocity * frame`."""

    shape: str
    colour: str
    radius: float
    start: tuple[float, float]  # where it would be at frame 0
    velocity: tuple[float, float]
    born: int
    gone: int

    @property
    def name(self) -> str:
        """Such as "red circle"."""
        return f"{self.colour} {self.shape}"

    def path(self) -> Floats:
        """Centres without camera shake, also for frames in which it is not there: [F, 2]."""
        time = np.arange(FRAMES, dtype=np.float64)[:, None]
        return np.asarray(np.asarray(self.start) + time * np.asarray(self.velocity))

    def alive(self) -> NDArray[np.bool_]:
        """Whether it is in the scene (perhaps hidden) in each frame: [F]."""
        time = np.arange(FRAMES)
        return (time >= self.born) & (time < self.gone)


@dataclass(frozen=True)
class Panel:
    """The number on screen: not shaken with the camera, in front of everything."""

    number: int
    corner: tuple[int, int]
    born: int
    gone: int

    def on(self, frame: int) -> bool:
        """Whether it is on screen in a frame."""
        return self.born <= frame < self.gone


@dataclass(frozen=True)
class Bar:
    """A still grey bar in front of the objects, shaken with the camera."""

    vertical: bool
    at: float
    width: float


@dataclass(frozen=True)
class Scene:
    """A clip before it is drawn; later things are in front of earlier ones."""

    things: tuple[Thing, ...]
    panel: Panel | None
    bar: Bar | None
    shake: Floats  # [F, 2]
    texture: int  # seed of the background


def make_scene(purpose: int, seed: int, index: int) -> Scene:
    """The scene number `index` of a seed; the same arguments give the same scene."""
    rng = np.random.default_rng([purpose, seed, index])
    count = int(rng.choice(4, p=COUNTS)) + 1  # before any rejection, which would favour few
    while True:
        scene = _draft(rng, count)
        if all(_clear_frames(scene, i) >= 4 for i in range(len(scene.things))):
            return scene


def reversed_scene(scene: Scene) -> Scene:
    """The same clip played backwards."""
    things = []
    for thing in scene.things:
        vx, vy = thing.velocity
        x, y = thing.start
        end = (x + vx * (FRAMES - 1), y + vy * (FRAMES - 1))
        born, gone = FRAMES - thing.gone, FRAMES - thing.born
        things.append(replace(thing, start=end, velocity=(-vx, -vy), born=born, gone=gone))
    panel = scene.panel
    if panel is not None:
        panel = replace(panel, born=FRAMES - panel.gone, gone=FRAMES - panel.born)
    return replace(scene, things=tuple(things), panel=panel, shake=scene.shake[::-1])


def _draft(rng: np.random.Generator, count: int) -> Scene:
    pairs = [(s, c) for s in SHAPES for c in COLOURS]
    while True:
        chosen = [pairs[i] for i in rng.choice(len(pairs), count, replace=False)]
        # Shared colours make binding hard to learn, so most clips have none.
        if len({c for _, c in chosen}) == count or rng.random() < 0.3:
            break
    things = tuple(_thing(rng, shape, colour) for shape, colour in chosen)
    step = rng.normal(0.0, 0.8, (FRAMES, 2))
    shake = np.clip(step + 0.6 * np.roll(step, 1, axis=0), -1.5, 1.5)
    bar = None
    if rng.random() < 0.3:
        bar = Bar(bool(rng.random() < 0.5), float(rng.uniform(20, 76)), float(rng.uniform(5, 9)))
    panel = _panel(rng) if rng.random() < 0.55 else None
    return Scene(things, panel, bar, shake, int(rng.integers(2**31)))


def _thing(rng: np.random.Generator, shape: str, colour: str) -> Thing:
    radius = float(rng.uniform(9.0, 11.5))
    born, gone = _life(rng)
    heading = DIRECTIONS[tuple(DIRECTIONS)[rng.integers(4)]]
    low, high = SPEEDS[rng.integers(2)]
    angle = float(rng.uniform(-0.25, 0.25))  # within 15 degrees of the axis
    speed = float(rng.uniform(low, high))
    cos, sin = np.cos(angle) * speed, np.sin(angle) * speed
    vx, vy = heading[0] * cos - heading[1] * sin, heading[1] * cos + heading[0] * sin
    first = [_room(rng, v, gone - 1 - born, radius) for v in (vx, vy)]
    start = (first[0] - vx * born, first[1] - vy * born)
    return Thing(shape, colour, radius, start, (vx, vy), born, gone)


def _life(rng: np.random.Generator) -> tuple[int, int]:
    """Frames of appearing and leaving: at least 8 of 16, most clips show things throughout."""
    kind = rng.random()
    if kind < 0.5:
        return 0, FRAMES
    if kind < 0.85:
        return int(rng.integers(4, 9)), FRAMES
    return 0, int(rng.integers(8, 13))


def _room(rng: np.random.Generator, velocity: float, frames: int, radius: float) -> float:
    """A first coordinate from which the whole path stays inside the picture."""
    travel = velocity * frames
    low, high = radius + 2 - min(travel, 0.0), SIDE - radius - 2 - max(travel, 0.0)
    return float(rng.uniform(low, high))


def _panel(rng: np.random.Generator) -> Panel:
    corner = (int(rng.integers(0, 5)) * 16, int(rng.integers(0, 10)) * 8)
    length = int(rng.integers(6, 13))
    born = int(rng.integers(0, FRAMES - length + 1))
    return Panel(int(rng.integers(10, 100)), corner, born, born + length)


def _clear_frames(scene: Scene, which: int) -> int:
    """Sampled frames in which nothing in front comes near the thing's centre."""
    thing = scene.things[which]
    path, clear = thing.path(), 0
    for frame in sampled_indices(FRAMES):
        if not thing.alive()[frame]:
            continue
        x, y = path[frame]
        hidden = any(
            other.alive()[frame]
            and np.hypot(*(other.path()[frame] - path[frame])) < thing.radius + 4
            for other in scene.things[which + 1 :]
        )
        panel, bar = scene.panel, scene.bar
        if panel is not None and panel.on(int(frame)):
            left, top = panel.corner
            hidden |= left - 4 < x < left + BOX[0] + 4 and top - 4 < y < top + BOX[1] + 4
        if bar is not None:
            hidden |= abs((x if bar.vertical else y) - bar.at) < bar.width / 2 + 3
        clear += not hidden
    return clear
