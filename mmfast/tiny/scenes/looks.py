"""Backgrounds, tints, sizes and aspects of a scene, and its drawing.

Places stay in units of a 96 x 96 picture, each axis with its own scale, as the tower sees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from PIL import Image

from mmfast.tiny.video import scene
from mmfast.tiny.video.scene import (
    COLOURS,
    FRAMES,
    MARGIN,
    SIDE,
    Bytes,
    Drawing,
    Floats,
    Scene,
    Style,
)

BACKGROUNDS = ("plain", "gradient", "photo", "blur")
FPS = 2  # a clip of 16 frames lasts 8 seconds, and the frames that the model sees are one each
SECONDS = FRAMES // FPS
# Canvases of nearly one area, sides divisible by the tower's grid; most are square.
CANVASES = ((192, 192), (192, 192), (216, 168), (168, 216), (228, 156), (252, 144))
ZOOMS = (0.75, 1.0, 1.0, 1.5)  # size of the file against the canvas
Ink = tuple[float, float, float]
Outline = tuple[Floats, ...]  # see `scene.Style`
PURE: dict[str, tuple[Ink, ...]] = {  # what drawing programs and libraries call so
    "red": ((255, 0, 0),), "green": ((0, 128, 0), (0, 255, 0)), "blue": ((0, 0, 255),),
    "yellow": ((255, 255, 0),), "purple": ((128, 0, 128),), "white": ((255, 255, 255),),
}  # fmt: skip
CONTRAST = 105.0  # least distance of a background's tints from the colours of things


@dataclass(frozen=True)
class SceneLook:
    """Everything about a picture that is not in its scene."""

    background: str
    tints: Floats  # [3, 3]
    seed: int
    width: int
    height: int
    zoom: float
    inks: Mapping[str, Ink] = field(default_factory=dict)  # other shades of colours, by name
    turns: tuple[float, ...] = ()  # of each thing, in radians
    outlines: Mapping[str, Outline] = field(default_factory=dict)  # others of a shape

    @property
    def scale(self) -> Floats:
        """Pixels of the canvas per unit, across and down."""
        return np.array([self.width / SIDE, self.height / SIDE])

    @property
    def square(self) -> bool:
        """Return whether both axes have one scale."""
        return self.width == self.height


@dataclass(frozen=True)
class SceneView:
    """A scene and its look."""

    scene: Scene
    look: SceneLook

    def style(self, thing: int) -> Style:
        """The drawing of a thing."""
        look, one = self.look, self.scene.things[thing]
        turn = look.turns[thing] if look.turns else 0.0
        return Style(look.inks.get(one.colour), turn, look.outlines.get(one.shape, ()))

    def reach(self, thing: int) -> Floats:
        """Ways from the centre of a thing to its corners top left and bottom right, in units."""
        one = self.scene.things[thing]
        reach = extents(one.shape, self.style(thing)) * one.radius * scene.SCALE
        return np.asarray(reach / self.look.scale)

    def box(self, thing: int, place: Floats) -> tuple[int, int, int, int]:
        """Box of a thing at a place (in units): left, top, right, bottom in 0 to 99."""
        corners = (place + self.reach(thing)) * (100 / SIDE)
        x1, y1, x2, y2 = np.clip(np.floor(corners), 0, 99).astype(int).ravel().tolist()
        return x1, y1, x2, y2


EXTENTS = {  # left, top, right, bottom of each shape in radii
    "circle": (-1, -1, 1, 1), "square": (-0.86, -0.86, 0.86, 0.86),
    "triangle": (-0.9, -1, 0.9, 0.8), "star": (-1.09, -1.15, 1.09, 0.93), "cross": (-1, -1, 1, 1),
}  # fmt: skip
_TIPS = np.pi / 5 * np.arange(10)
CORNERS: dict[str, Floats] = {  # in radii, of the shapes that a turn changes
    "square": np.array([(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)]),
    "triangle": np.array([(0, -1), (0.9, 0.8), (-0.9, 0.8)]),
    "star": np.stack([np.sin(_TIPS), -np.cos(_TIPS)], 1) * np.tile([[1.15], [0.5]], (5, 1)),
    "cross": np.array([(-0.34, -1), (0.34, -1), (0.34, -0.34), (1, -0.34), (1, 0.34), (0.34, 0.34),
                       (0.34, 1), (-0.34, 1), (-0.34, 0.34), (-1, 0.34), (-1, -0.34),
                       (-0.34, -0.34)]),
}  # fmt: skip


def extents(shape: str, style: Style) -> Floats:
    """Corners top left and bottom right of a shape, in radii: `[2, 2]`."""
    corners = np.concatenate(style.outline) if style.outline else CORNERS.get(shape)
    if corners is None or not (style.turn or style.outline):
        return np.array(EXTENTS[shape], np.float64).reshape(2, 2)
    turned = style.corners(corners)
    return np.stack([turned.min(0), turned.max(0)])


def make_view(
    purpose: int, seed: int, index: int, lone: bool = False, shades: bool = False
) -> SceneView:
    """The view number `index` of a seed; births fall on frames that the model is shown.

    `lone` has one thing of any size, near the centre, mostly before nothing but a tint: the first
    picture that people draw. `shades` has other shades of each colour, and things that are turned.
    """
    draft = scene.make_scene(purpose, seed, index)
    rng = np.random.default_rng([purpose, seed, index, 17])
    inks = {name: _ink(rng, name) for name in COLOURS} if shades else {}
    if lone:
        return _turned(_lone(draft, rng, inks), shades)
    shown = scene.sampled_indices(FRAMES)
    factor = float(rng.uniform(0.72, 1.05))
    things = tuple(
        replace(
            thing,
            radius=thing.radius * factor,
            born=int(shown[np.searchsorted(shown, thing.born)]),
        )
        for thing in draft.things
    )
    panel = draft.panel
    if panel is not None:
        panel = replace(panel, born=int(shown[np.searchsorted(shown, panel.born)]))
    look = _look(rng, [thing.colour for thing in things], inks)
    return _turned(SceneView(replace(draft, things=things, panel=panel), look), shades)


def _turned(view: SceneView, shades: bool) -> SceneView:
    """With `shades`, every third thing turned, and triangles of any sides."""
    if not shades:
        return view
    rng = np.random.default_rng([view.look.seed, 29])
    angles = (rng.choice((rng.integers(8) * np.pi / 4, rng.uniform(0, 2 * np.pi)))
              for _ in view.scene.things)  # fmt: skip
    turns = tuple(float(angle) * (rng.random() < 0.35) for angle in angles)
    outlines: dict[str, Outline] = {}
    if rng.random() < 0.4:
        apart = rng.uniform(0.9, 1.6, 3)  # every corner between 51 and 91 degrees or so
        around = (apart / apart.sum() * 2 * np.pi).cumsum() + rng.uniform(0, 2 * np.pi)
        outlines["triangle"] = (np.stack([np.cos(around), np.sin(around)], 1) * 1.1,)
    return replace(view, look=replace(view.look, turns=turns, outlines=outlines))


def _ink(rng: np.random.Generator, name: str) -> Ink:
    """A shade between ours and what others call so."""
    pure = PURE[name][rng.integers(len(PURE[name]))]
    ours = np.asarray(COLOURS[name])
    mixed = ours + rng.choice((0.5, 1.0)) * rng.random() * (np.asarray(pure) - ours)
    red, green, blue = np.clip(mixed + rng.uniform(-12, 12, 3), 0, 255).tolist()
    return red, green, blue


def _lone(draft: Scene, rng: np.random.Generator, inks: Mapping[str, Ink]) -> SceneView:
    """The first thing of a scene, on its own."""
    thing = replace(draft.things[0], born=0, gone=FRAMES)
    velocity = np.asarray(thing.velocity) * rng.choice((0.7, 1.0))
    travel = velocity * (FRAMES - 1)
    aside = rng.uniform(-16, 16, 2) * (rng.random() < 0.5)
    most = SIDE / 2 - 2 - float((np.abs(travel) / 2 + np.abs(aside)).max())
    radius = float(rng.uniform(6.0, max(min(most, 28.0), 8.0)))
    start = SIDE / 2 + aside - travel / 2
    thing = replace(thing, radius=radius, start=tuple(start), velocity=tuple(velocity))
    panel = draft.panel if rng.random() < 0.3 else None
    shake = draft.shake * (rng.random() < 0.3)
    look = _look(rng, [thing.colour], inks)
    if rng.random() < 0.75:
        look = replace(look, background="plain")
    if rng.random() < 0.5:
        used = np.asarray(inks.get(thing.colour, COLOURS[thing.colour]))
        greys = [g for g in range(256) if np.linalg.norm(used - g) >= CONTRAST]
        ends = [g for g in (greys[0], greys[-1]) if g in (0, 255)]  # black and white are common
        grey = rng.choice(ends if ends and rng.random() < 0.5 else greys)
        look = replace(look, tints=np.concatenate([np.full((1, 3), float(grey)), look.tints[1:]]))
    return SceneView(replace(draft, things=(thing,), panel=panel, bar=None, shake=shake), look)


def _look(rng: np.random.Generator, names: Sequence[str], inks: Mapping[str, Ink]) -> SceneLook:
    colours = [inks.get(name, COLOURS[name]) for name in names]
    background = BACKGROUNDS[rng.integers(len(BACKGROUNDS))]
    width, height = CANVASES[rng.integers(len(CANVASES))]
    tints = np.stack([_tint(rng, colours) for _ in range(3)])
    zoom = ZOOMS[rng.integers(len(ZOOMS))]
    return SceneLook(background, tints, int(rng.integers(2**31)), width, height, zoom, inks)


def _tint(rng: np.random.Generator, colours: Sequence[Ink]) -> Floats:
    used = np.array(colours or [(0, 0, 0)], np.float64)
    for _ in range(40):
        tint = np.clip(rng.uniform(15, 220) + rng.uniform(-40, 40, 3), 0, 255)
        if np.linalg.norm(used - tint, axis=1).min() >= CONTRAST:
            return np.asarray(tint)
    return np.full(3, 50.0)


def backdrop(look: SceneLook) -> Floats:
    """Background of a look with a margin on each side: `[H, W, 3]`."""
    rng = np.random.default_rng(look.seed)
    high, wide = look.height + 2 * MARGIN, look.width + 2 * MARGIN
    one, two, three = look.tints
    if look.background == "plain":
        return np.broadcast_to(one, (high, wide, 3)).copy()
    if look.background == "gradient":
        angle = rng.uniform(0, 2 * np.pi)
        y, x = np.linspace(-1, 1, high)[:, None], np.linspace(-1, 1, wide)
        ramp = np.clip(0.5 + 0.5 * (np.cos(angle) * x + np.sin(angle) * y), 0, 1)[..., None]
        return np.asarray(one + ramp * (_apart(one, two) - one))
    if look.background == "blur":
        soft = [_cloud(rng, high, wide, 3.0)[..., None] for _ in range(2)]
        mixed = one + soft[0] * (_apart(one, two) - one)
        return np.asarray(mixed + soft[1] * (three - mixed) * 0.6)
    return _photograph(rng, high, wide, look.tints)


def _apart(one: Floats, two: Floats) -> Floats:
    """The second tint, or a darker one where both are nearly the same."""
    return two if float(np.linalg.norm(one - two)) > 45 else np.asarray(one * 0.35)


def _cloud(rng: np.random.Generator, high: int, wide: int, power: float) -> Floats:
    """Noise whose amplitude falls with a power of the frequency, in 0 to 1."""
    y, x = np.fft.fftfreq(high)[:, None] * high, np.fft.rfftfreq(wide) * wide
    fall = np.maximum(np.hypot(y, x), 1.0) ** -power
    fall[0, 0] = 0.0
    found = np.fft.irfft2(np.fft.rfft2(rng.normal(size=(high, wide))) * fall, (high, wide))
    low, top = np.percentile(found, (2, 98))
    return np.asarray(np.clip((found - low) / max(top - low, 1e-9), 0, 1))


def _photograph(rng: np.random.Generator, high: int, wide: int, tints: Floats) -> Floats:
    """A landscape: sky above a broken skyline, rough ground, grain everywhere."""
    line = high * rng.uniform(0.25, 0.7)
    ridge = _cloud(rng, 2, wide, 1.2)[0] - 0.5
    ground = (np.arange(high)[:, None] > line + ridge * high * 0.3)[..., None]
    sky = tints[0] * (0.75 + 0.25 * _cloud(rng, high, wide, 2.0)[..., None])
    rough = _cloud(rng, high, wide, 1.1)[..., None]
    soil = tints[1] + rough * (_apart(tints[1], tints[2]) - tints[1])
    grain = rng.normal(0, 7, (high, wide, 1))
    return np.asarray(np.clip(np.where(ground, soil, sky) + grain, 0, 255))


def draw(view: SceneView, times: Iterable[int] = range(FRAMES)) -> Drawing:
    """Draw a view on its canvas; frames that are not in `times` stay black."""
    plan, look = view.scene, view.look
    behind = backdrop(look)
    frames = np.zeros((FRAMES, look.height, look.width, 3), np.uint8)
    owner = np.zeros(frames.shape[:3], np.uint8)
    whole = np.zeros(len(plan.things), np.int64)
    for t in times:
        shift = plan.shake[t]
        dx, dy = (MARGIN - np.round(shift * look.scale)).astype(int)
        picture = behind[dy : dy + look.height, dx : dx + look.width].copy()
        for i, thing in enumerate(plan.things):
            if thing.alive()[t]:
                centre = (thing.path()[t] + shift) * look.scale
                size = scene.paint(picture, owner[t], thing, i, centre, view.style(i))
                whole[i] = max(whole[i], size)
        if plan.bar is not None:
            scene.paint_bar(picture, owner[t], plan.bar, shift, look.scale)
        if plan.panel is not None and plan.panel.on(t):
            scene.paint_panel(picture, owner[t], replace(plan.panel, corner=corner(view)))
        frames[t] = picture
    return Drawing(frames, owner, whole)


def corner(view: SceneView) -> tuple[int, int]:
    """Corner of the number's panel in half pixels, moved so that all of it is inside."""
    assert view.scene.panel is not None
    look, given = view.look, np.asarray(view.scene.panel.corner)
    most = np.array([look.width, look.height]) / scene.SCALE - scene.BOX
    x, y = np.minimum(given * look.scale / scene.SCALE, most).astype(int)
    return int(x), int(y)


def resize(frames: Bytes, zoom: float) -> Bytes:
    """Frames at the size of their file; sides are even, as H.264 wants them."""
    high, wide = (2 * round(side * zoom / 2) for side in frames.shape[1:3])
    if (high, wide) == frames.shape[1:3]:
        return frames
    way = Image.Resampling.BICUBIC
    return np.stack([np.asarray(Image.fromarray(f).resize((wide, high), way)) for f in frames])
