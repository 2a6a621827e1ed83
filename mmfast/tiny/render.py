"""Draw a scene: frames as a camera would give them, and which object every pixel shows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmfast.tiny.scene import BOX, COLOURS, FRAMES, SIDE, Bar, Floats, Panel, Scene, Thing

PIXELS = 192  # side of a clip file
SCALE = PIXELS / SIDE
MARGIN = 8  # of background around the picture, so that shaking never shows an edge
# Pixel owners besides 1 + index of a thing (up to 4): background, left and right digit, bar.
NOTHING, LEFT, RIGHT, BAR = 0, 5, 6, 7

# 5 x 7 dots per digit, one number a row, most significant bit on the left.
DIGITS = (
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 6, 8, 16, 31),
    (31, 1, 2, 6, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)
DOT = 5  # pixels of the file per dot: digits are 17.5 units high

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Drawing:
    """Frames and, for each pixel, what it shows."""

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
            _paint_bar(picture, owner[t], scene.bar, shift)
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


def paint(picture: Floats, owner: Bytes, thing: Thing, index: int, centre: Floats) -> int:
    """Paint one thing into its bounding square; returns how many pixels it owns."""
    r = thing.radius * SCALE
    x0, y0 = np.maximum(np.floor(centre - 1.2 * r).astype(int) - 1, 0)
    x1, y1 = np.minimum(np.ceil(centre + 1.2 * r).astype(int) + 2, len(picture))
    x = np.arange(x0, x1, dtype=np.float64)[None, :] + 0.5 - centre[0]
    y = np.arange(y0, y1, dtype=np.float64)[:, None] + 0.5 - centre[1]
    alpha = np.clip(0.5 - _distance(thing.shape, x, y, r), 0, 1)[..., None]
    patch = picture[y0:y1, x0:x1]
    patch += alpha * (np.asarray(COLOURS[thing.colour], np.float64) - patch)
    inside = alpha[..., 0] > 0.5
    owner[y0:y1, x0:x1][inside] = index + 1
    return int(inside.sum())


def _paint_bar(picture: Floats, owner: Bytes, bar: Bar, shift: Floats) -> None:
    at = (bar.at + shift[0 if bar.vertical else 1]) * SCALE
    low, high = round(at - bar.width * SCALE / 2), round(at + bar.width * SCALE / 2)
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
