"""The world of the embedded video model: scenes from a seed, their drawing, and its labels.

Lengths are in units of a 96 x 96 picture whatever the size of the file; time is in frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor

SIDE = 96.0  # the unit picture
FRAMES = 16  # frames in a clip
SAMPLED = 8  # frames the model is shown
FPS = 8
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (225, 45, 40), "green": (50, 190, 60), "blue": (50, 90, 235),
    "yellow": (235, 215, 50), "purple": (180, 60, 210), "white": (240, 240, 240),
}  # fmt: skip
DIRECTIONS: dict[str, tuple[float, float]] = {
    "left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0),
}  # fmt: skip
SPEEDS = ((1.5, 2.0), (3.4, 4.4))  # slow and fast, per frame; nothing in between, so order is clear
BOX = (32, 24)  # width and height of the number's panel
COUNTS = (0.16, 0.26, 0.3, 0.28)  # shares of clips with 1 to 4 things
TRAIN, EVAL, CLIPS = 0, 1, 2  # seeds of different purposes never meet

Floats = NDArray[np.float64]


def sampled_indices(total: int, count: int = SAMPLED) -> NDArray[np.int64]:
    """Indices of uniform sampling: `count` of `total` frames, both ends included."""
    return np.round(np.linspace(0, total - 1, count)).astype(np.int64)


def corner_of(point: Floats | tuple[float, float], margin: float = 0.0) -> str:
    """Corner of the picture that a point lies in, "" nearer than `margin` to a middle line."""
    x, y = point
    if min(abs(x - SIDE / 2), abs(y - SIDE / 2)) < margin:
        return ""
    return f"{'top' if y < SIDE / 2 else 'bottom'} {'left' if x < SIDE / 2 else 'right'}"


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
        """Name such as "red circle"."""
        return f"{self.colour} {self.shape}"

    def path(self) -> Floats:
        """Centres without camera shake, also for frames before birth or after leaving: `[F, 2]`."""
        time = np.arange(FRAMES, dtype=np.float64)[:, None]
        return np.asarray(np.asarray(self.start) + time * np.asarray(self.velocity))

    def alive(self) -> NDArray[np.bool_]:
        """Return whether it is in the scene (perhaps hidden) in each frame: `[F]`."""
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
        """Return whether it is on screen in a frame."""
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


PIXELS = 192  # side of a clip file
SCALE = PIXELS / SIDE
MARGIN = 8  # of background around the picture, so that shaking never shows an edge
# Pixel owners besides 1 + index of a thing (up to 4): background, left and right digit, bar.
NOTHING, LEFT, RIGHT, BAR = 0, 5, 6, 7

# 5 x 7 dots per digit, one number a row, most significant bit on the left.
DIGITS = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 6, 8, 16, 31),
    (31, 1, 2, 6, 1, 17, 14), (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8), (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip
DOT = 5  # pixels of the file per dot: digits are 17.5 units high

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Drawing:
    """Frames and the owner of each pixel."""

    frames: Bytes  # [F, PIXELS, PIXELS, 3]
    owner: Bytes  # [F, PIXELS, PIXELS]
    whole: NDArray[np.int64]  # [things] pixels of each thing when nothing hides it


def draw(scene: Scene) -> Drawing:
    """Draw all frames of a scene."""
    backdrop = ground(np.random.default_rng(scene.texture))
    frames = np.empty((FRAMES, PIXELS, PIXELS, 3), np.uint8)
    owner = np.zeros((FRAMES, PIXELS, PIXELS), np.uint8)
    whole = np.zeros(len(scene.things), np.int64)
    for t in range(FRAMES):
        shift = scene.shake[t]
        dx, dy = (MARGIN - np.round(shift * SCALE)).astype(int)
        picture = backdrop[dy : dy + PIXELS, dx : dx + PIXELS].copy()
        for i, thing in enumerate(scene.things):
            if thing.alive()[t]:
                size = paint(picture, owner[t], thing, i, (thing.path()[t] + shift) * SCALE)
                whole[i] = max(whole[i], size)
        if scene.bar is not None:
            paint_bar(picture, owner[t], scene.bar, shift, np.full(2, SCALE))
        if scene.panel is not None and scene.panel.on(t):
            paint_panel(picture, owner[t], scene.panel)
        frames[t] = picture
    return Drawing(frames, owner, whole)


def ground(rng: np.random.Generator, pixels: int = PIXELS) -> Floats:
    """A dim texture: soft blobs of two tints, grain, and stripes in some clips."""
    side = pixels + 2 * MARGIN
    grid = np.linspace(0, 1, side)
    tints = rng.uniform(35, 100, (2, 3))
    cells = int(rng.integers(4, 10))
    coarse = rng.random((cells, cells))
    at = grid * (cells - 1)
    low = np.minimum(at.astype(int), cells - 2)
    part = at - low
    rows = coarse[low] * (1 - part)[:, None] + coarse[low + 1] * part[:, None]
    soft = rows[:, low] * (1 - part) + rows[:, low + 1] * part  # [side, side]
    if rng.random() < 0.4:
        wave = rng.uniform(10, 40) * (grid[:, None] * rng.normal() + grid * rng.normal())
        soft = 0.7 * soft + 0.3 * (np.sin(wave) > 0)
    grain = rng.normal(0, 6, (side // 2, side // 2)).repeat(2, 0).repeat(2, 1)
    mixed = tints[0] + soft[..., None] * (tints[1] - tints[0]) + grain[..., None]
    return np.asarray(np.clip(mixed, 0, 255))


@dataclass(frozen=True)
class Style:
    """The drawing of a thing that is not drawn plainly."""

    ink: Sequence[float] | None = None  # another red, green and blue than that of its colour
    turn: float = 0.0  # clockwise, in radians
    outline: tuple[Floats, ...] = ()  # polygons `[k, 2]`, in radii; a second is a hole

    def corners(self, points: Floats) -> Floats:
        """Points `[k, 2]` after the turn."""
        cos, sin = np.cos(self.turn), np.sin(self.turn)
        return np.asarray(points @ np.array([[cos, sin], [-sin, cos]]))


PLAIN = Style()


def _polygons(outline: Sequence[Floats], x: Floats, y: Floats) -> Floats:
    """Signed distance to polygons, negative inside an odd number of them."""
    nearest, inside = np.full(np.broadcast_shapes(x.shape, y.shape), np.inf), np.array(False)
    for polygon in outline:
        for (x1, y1), (x2, y2) in zip(polygon, np.roll(polygon, -1, 0), strict=True):
            dx, dy = x2 - x1, y2 - y1
            part = np.clip(((x - x1) * dx + (y - y1) * dy) / max(dx**2 + dy**2, 1e-9), 0, 1)
            nearest = np.minimum(nearest, np.hypot(x - x1 - part * dx, y - y1 - part * dy))
            if dy:
                inside = inside ^ (((y1 > y) != (y2 > y)) & (x < x1 + (y - y1) * dx / dy))
    return np.where(inside, -nearest, nearest)


def _distance(shape: str, x: Floats, y: Floats, r: float) -> Floats:
    """Signed distance to the outline in pixels, negative inside (near enough for smoothing)."""
    if shape == "circle":
        return np.asarray(np.hypot(x, y) - r)
    if shape == "square":
        return np.asarray(np.maximum(np.abs(x), np.abs(y)) - 0.86 * r)
    if shape == "triangle":
        slope = (np.abs(x) * 2.0 - (y + r)) / np.sqrt(5.0)
        return np.asarray(np.maximum(slope, y - 0.8 * r))
    if shape == "cross":
        wide = np.maximum(np.abs(x) - r, np.abs(y) - 0.34 * r)
        tall = np.maximum(np.abs(y) - r, np.abs(x) - 0.34 * r)
        return np.asarray(np.minimum(wide, tall))
    # A five-pointed star: fold the plane into one half of one point, then one straight edge.
    fold = 2 * np.pi / 5
    angle = np.abs((np.arctan2(x, -y) + fold / 2) % fold - fold / 2)
    radius = np.hypot(x, y)
    px, py = radius * np.cos(angle), radius * np.sin(angle)
    tip, dent = np.array([1.15 * r, 0.0]), 0.5 * r * np.array([np.cos(fold / 2), np.sin(fold / 2)])
    edge = (dent - tip) / np.hypot(*(dent - tip))
    return np.asarray((px - tip[0]) * edge[1] - (py - tip[1]) * edge[0])


def paint(
    picture: Floats,
    owner: Bytes,
    thing: Thing,
    index: int,
    centre: Floats,
    style: Style = PLAIN,
) -> int:
    """Paint one thing into its bounding square; returns the number of its pixels."""
    r = thing.radius * SCALE
    x0, y0 = np.maximum(np.floor(centre - 1.3 * r).astype(int) - 1, 0)
    x1, y1 = np.minimum(np.ceil(centre + 1.3 * r).astype(int) + 2, picture.shape[1::-1])
    x = np.arange(x0, x1, dtype=np.float64)[None, :] + 0.5 - centre[0]
    y = np.arange(y0, y1, dtype=np.float64)[:, None] + 0.5 - centre[1]
    if style.outline:
        gap = _polygons([style.corners(polygon) * r for polygon in style.outline], x, y)
    else:
        cos, sin = np.cos(style.turn), np.sin(style.turn)
        gap = _distance(thing.shape, cos * x + sin * y, cos * y - sin * x, r)
    alpha = np.clip(0.5 - gap, 0, 1)[..., None]
    patch = picture[y0:y1, x0:x1]
    patch += alpha * (np.asarray(style.ink or COLOURS[thing.colour], np.float64) - patch)
    inside = alpha[..., 0] > 0.5
    owner[y0:y1, x0:x1][inside] = index + 1
    return int(inside.sum())


def paint_bar(picture: Floats, owner: Bytes, bar: Bar, shift: Floats, scale: Floats) -> None:
    """Paint a bar at `scale` pixels per unit, across and down."""
    axis = 0 if bar.vertical else 1
    at, half = (bar.at + shift[axis]) * scale[axis], bar.width * scale[axis] / 2
    low, high = round(at - half), round(at + half)
    where = (slice(None), slice(low, high)) if bar.vertical else (slice(low, high), slice(None))
    picture[where] = 0.15 * picture[where] + 0.85 * np.array([70.0, 68.0, 66.0])
    owner[where] = BAR


def paint_panel(picture: Floats, owner: Bytes, panel: Panel) -> None:
    """Paint the number's panel with its corner in units of the scene."""
    left, top = (int(c * SCALE) for c in panel.corner)
    width, height = (int(b * SCALE) for b in BOX)
    where = (slice(top, top + height), slice(left, left + width))
    picture[where] = 12.0
    for place, digit in enumerate(divmod(panel.number, 10)):
        dots = (np.array(DIGITS[digit])[:, None] >> np.arange(4, -1, -1)) & 1  # [7, 5]
        glyph = dots.repeat(DOT, 0).repeat(DOT, 1).astype(bool)
        side = left + place * (width // 2)
        owner[top : top + height, side : side + width // 2] = (LEFT, RIGHT)[place]
        y, x = top + (height - 7 * DOT) // 2, side + 3
        picture[y : y + 7 * DOT, x : x + 5 * DOT][glyph] = (250.0, 245.0, 200.0)


THINGS = 4
PATCHES, CELLS = 12, 6  # sides of the tower's grid and of the pooled grid
_COLOUR_NAMES = tuple(COLOURS)


@dataclass(frozen=True)
class Table:
    """Facts at the sampled frames; rows of things that do not exist are never alive."""

    shape: NDArray[np.int8]  # [THINGS] index into SHAPES, -1 = no such thing
    colour: NDArray[np.int8]  # [THINGS] index into COLOURS
    place: NDArray[np.float32]  # [THINGS, T, 2] centre on screen, in units of a 96 picture
    world: NDArray[np.float32]  # [THINGS, T, 2] centre without camera shake
    alive: NDArray[np.bool_]  # [THINGS, T]
    seen: NDArray[np.float32]  # [THINGS, T] share of its pixels that nothing hides
    number: int  # -1 = none
    shown: NDArray[np.bool_]  # [T] whether the number is on screen

    @property
    def count(self) -> int:
        """Number of things."""
        return int((self.shape >= 0).sum())

    def name(self, thing: int) -> str:
        """Name such as "red circle"."""
        return " ".join(reversed(self.looks[thing]))

    @property
    def looks(self) -> list[tuple[str, str]]:
        """Shape and colour of each thing."""
        rows = zip(self.shape[: self.count], self.colour[: self.count], strict=True)
        return [(SHAPES[shape], _COLOUR_NAMES[colour]) for shape, colour in rows]

    def clear(self, thing: int) -> NDArray[np.bool_]:
        """Frames in which at least half of the thing is in sight: [T]."""
        return np.asarray(self.alive[thing] & (self.seen[thing] >= 0.5))

    def backwards(self) -> Table:
        """The same facts for the frames in reverse order."""
        names = ("place", "world", "alive", "seen")
        flipped: dict[str, Any] = {name: getattr(self, name)[:, ::-1] for name in names}
        return replace(self, **flipped, shown=self.shown[::-1])


def make_table(scene: Scene, drawing: Drawing) -> Table:
    """Measure a drawn scene at the frames that the model is shown."""
    times = sampled_indices(FRAMES)
    shape, colour = np.full(THINGS, -1, np.int8), np.full(THINGS, -1, np.int8)
    place, world = (np.zeros((THINGS, SAMPLED, 2), np.float32) for _ in range(2))
    alive, seen = np.zeros((THINGS, SAMPLED), bool), np.zeros((THINGS, SAMPLED), np.float32)
    for i, thing in enumerate(scene.things):
        shape[i] = SHAPES.index(thing.shape)
        colour[i] = _COLOUR_NAMES.index(thing.colour)
        path = thing.path()
        world[i], place[i] = path[times], (path + scene.shake)[times]
        alive[i] = thing.alive()[times]
        pixels = (drawing.owner[times] == i + 1).sum((1, 2))
        seen[i] = pixels / max(int(drawing.whole[i]), 1)
    panel = scene.panel
    number = -1 if panel is None else panel.number
    shown = np.array([panel is not None and panel.on(int(t)) for t in times])
    return Table(shape, colour, place, world, alive, seen, number, shown)


def patch_owners(drawing: Drawing, side: int, share: float) -> NDArray[np.int8]:
    """Owner of each patch, int8 `[T, side * side]`: a thing or digit from a `share` of it on."""
    owner = drawing.owner[sampled_indices(FRAMES)]
    high, wide = (size // side for size in owner.shape[1:])
    blocks = rearrange(owner, "t (y p) (x q) -> t (y x) (p q)", p=high, q=wide)
    counts = np.stack([(blocks == k).sum(-1) for k in range(1, RIGHT + 1)], -1)
    best = counts.argmax(-1) + 1
    enough = counts.max(-1) >= share * high * wide
    return np.where(enough, best, 0).astype(np.int8)


IGNORE = -100
SIZES = {"shape": 6, "colour": 7, "digit": 21}  # class 0 = none, in each
NAMED = {"way": 4, "fast": 2, "born": 8}  # of a thing that a question names
MOTION = {"way": 4, "fast": 2, "born": 8, "corner": 9}  # of a thing, as far as seen so far


@dataclass(frozen=True)
class PatchLabels:
    """Labels of the patches of frames."""

    classes: dict[str, Tensor]  # names and sizes as in SIZES, int64. `[..., P]`
    offset: Tensor  # from the patch's centre to the thing's, in patches; nan = none. `[..., P, 2]`


def patch_labels(owners: Tensor, table: Table) -> PatchLabels:
    """Labels of the content of each patch: owners `[T, P]`."""
    owner = owners.long()
    classes = {name: torch.tensor(value)[owner] for name, value in patch_values(table).items()}
    places = torch.from_numpy(np.ascontiguousarray(table.place)).transpose(0, 1)
    return PatchLabels(classes, patch_offsets(owner, places))


def patch_values(table: Table) -> dict[str, list[int]]:
    """Class of what each owner shows, nothing first: 3 + THINGS numbers each."""
    tens, ones = divmod(max(table.number, 0), 10)
    return {
        "shape": [0, *(table.shape + 1).tolist(), 0, 0],
        "colour": [0, *(table.colour + 1).tolist(), 0, 0],
        "digit": [0, *[0] * THINGS, 1 + tens, 11 + ones],
    }


def patch_offsets(owner: Tensor, places: Tensor) -> Tensor:
    """Ways from patches to the centres of their things, see `PatchLabels`.

    Owners are int64 `[n, P]`, places of the things `[n, THINGS, 2]`; the result is `[n, P, 2]`.
    """
    side = round(owner.shape[1] ** 0.5)
    spot = torch.arange(side**2, device=owner.device)
    centre = (torch.stack([spot % side, spot // side], -1) + 0.5) * (SIDE / side)  # [P, 2]
    thing = (owner - 1).clamp(0, THINGS - 1)
    place = places.gather(1, thing[..., None].expand(-1, -1, 2))
    outside = (owner < 1) | (owner > THINGS)
    offset: Tensor = (place - centre) * (side / SIDE)
    return offset.masked_fill(outside[..., None], float("nan"))


def thing_labels(table: Table) -> dict[str, Tensor]:
    """Motion and first frame of each thing, row 0 for none: `[1 + THINGS]` each."""
    found = {name: torch.full((1 + THINGS,), IGNORE) for name in NAMED}
    for i in range(table.count):
        move = table.world[i, 1] - table.world[i, 0]
        main = int(np.abs(move).argmax())
        found["way"][i + 1] = 2 * main + int(move[main] > 0)
        # Speeds are drawn from two ranges with nothing between (per sampled step: x 15 / 7).
        found["fast"][i + 1] = int(np.hypot(*move) > 2.6 * 2)
        found["born"][i + 1] = int(table.alive[i].argmax())
    return found


def motion_labels(owners: Tensor, table: Table) -> dict[str, Tensor]:
    """Motion of the thing in each patch, from the second sight of it on: `[T, P]` each."""
    owner, things = owners.long(), thing_labels(table)
    values = {name: torch.full((THINGS + 3, len(owner)), IGNORE) for name in MOTION}
    for i in range(table.count):
        seen = np.flatnonzero(table.clear(i))
        if len(seen) < 2:
            continue
        first, second = int(seen[0]), int(seen[1])
        x, y = np.clip(table.place[i, first] // 32, 0, 2).astype(int)
        values["corner"][i + 1, first:] = 3 * int(y) + int(x)
        for name, since in (("way", second), ("fast", second), ("born", first)):
            values[name][i + 1, since:] = things[name][i + 1]
    frame = torch.arange(len(owner))[:, None].expand_as(owner)
    return {name: value[owner, frame] for name, value in values.items()}


def count_labels(table: Table) -> Tensor:
    """Number of things that have come into sight up to and including each frame: `[T]`."""
    seen = np.stack([table.clear(i) for i in range(THINGS)])  # [THINGS, T]
    return torch.from_numpy(np.maximum.accumulate(seen, 1).sum(0))
