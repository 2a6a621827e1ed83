"""What is true of a clip, as numbers: one row per thing and sampled frame, and patch labels."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mmfast.tiny.render import PIXELS, RIGHT, Drawing
from mmfast.tiny.scene import COLOURS, FRAMES, SAMPLED, SHAPES, Scene, sampled_indices

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
        """How many things there are."""
        return int((self.shape >= 0).sum())

    def name(self, thing: int) -> str:
        """Such as "red circle"."""
        return f"{_COLOUR_NAMES[self.colour[thing]]} {SHAPES[self.shape[thing]]}"

    def clear(self, thing: int) -> NDArray[np.bool_]:
        """Frames in which at least half of the thing is in sight: [T]."""
        return np.asarray(self.alive[thing] & (self.seen[thing] >= 0.5))

    def backwards(self) -> "Table":
        """The same facts for the frames in reverse order."""
        flip = slice(None, None, -1)
        return Table(
            self.shape,
            self.colour,
            self.place[:, flip],
            self.world[:, flip],
            self.alive[:, flip],
            self.seen[:, flip],
            self.number,
            self.shown[flip],
        )


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
    """What each patch of a side x side grid shows: the owner of most of its pixels.

    Only background and bar can be outvoted: anything else wins from `share` of the patch.

    Returns:
        int8 [T, side * side]: 0 nothing, 1 to 4 a thing, 5 and 6 the left and right digit.
    """
    owner = drawing.owner[sampled_indices(FRAMES)]
    step = PIXELS // side
    blocks = owner.reshape(len(owner), side, step, side, step)
    counts = np.stack([(blocks == k).sum((2, 4)) for k in range(1, RIGHT + 1)], -1)
    best = counts.argmax(-1) + 1
    enough = counts.max(-1) >= share * step * step
    return np.where(enough, best, 0).reshape(len(owner), -1).astype(np.int8)
