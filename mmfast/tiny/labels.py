"""Dense labels: what every patch shows in its frame, and how that thing moves in the clip."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmfast.tiny.scene import SIDE
from mmfast.tiny.table import THINGS, Table

LEFT, RIGHT = THINGS + 1, THINGS + 2  # owners that are digits
IGNORE = -100
SIZES = {"shape": 6, "colour": 7, "digit": 21}  # class 0 = none, in each
NAMED = {"way": 4, "fast": 2, "born": 8}  # of a thing that a question names
MOTION = {"way": 4, "fast": 2, "born": 8, "corner": 9}  # of a thing, as far as seen so far


@dataclass(frozen=True)
class Dense:
    """Labels of the patches of frames: each [..., P]."""

    classes: dict[str, Tensor]  # int64, names and sizes as in SIZES
    offset: Tensor  # [..., P, 2] from the patch's centre to the thing's, in patches; nan = none


def look_labels(owners: Tensor, table: Table) -> Dense:
    """What each patch shows: owners [T, P]."""
    owner = owners.long()  # [T, P]
    frames, patches = owner.shape
    side = round(patches**0.5)

    def pick(values: list[int]) -> Tensor:
        return torch.tensor(values)[owner]

    tens, ones = divmod(max(table.number, 0), 10)
    things = range(THINGS)
    classes = {
        "shape": pick([0, *(int(table.shape[i]) + 1 for i in things), 0, 0]),
        "colour": pick([0, *(int(table.colour[i]) + 1 for i in things), 0, 0]),
        "digit": pick([0, *(0 for _ in things), 1 + tens, 11 + ones]),
    }
    spot = torch.arange(patches)
    row, column = spot // side, spot % side
    centre = (torch.stack([column, row], -1) + 0.5) * (SIDE / side)  # [P, 2]
    thing = (owner - 1).clamp(0, THINGS - 1)
    where = torch.from_numpy(np.ascontiguousarray(table.place)).permute(1, 0, 2)  # [T, THINGS, 2]
    place = where.gather(1, thing[..., None].expand(frames, patches, 2))
    offset = (place - centre) * (side / SIDE)
    outside = (owner < 1) | (owner > THINGS)
    return Dense(classes, offset.masked_fill(outside[..., None], float("nan")))


def motion_labels(owners: Tensor, table: Table) -> dict[str, Tensor]:
    """How the thing in each patch moves, from the second sight of it on: [T, P] each."""
    owner = owners.long()
    values = {name: torch.full((THINGS + 3, len(owner)), IGNORE) for name in MOTION}
    for i in range(table.count):
        seen = np.flatnonzero(table.clear(i))
        if len(seen) < 2:
            continue
        move = table.world[i, 1] - table.world[i, 0]
        main = int(np.abs(move).argmax())
        after = slice(int(seen[1]), None)
        # Speeds are drawn from two ranges with nothing between (per sampled step: x 15 / 7).
        values["fast"][i + 1, after] = int(np.hypot(*move) > 2.6 * 2)
        values["way"][i + 1, after] = 2 * main + int(move[main] > 0)
        values["born"][i + 1, int(seen[0]) :] = int(table.alive[i].argmax())
        x, y = np.clip(table.place[i, seen[0]] // 32, 0, 2).astype(int)
        values["corner"][i + 1, int(seen[0]) :] = 3 * int(y) + int(x)
    frame = torch.arange(len(owner))[:, None].expand_as(owner)
    return {name: value[owner, frame] for name, value in values.items()}


def thing_labels(table: Table) -> dict[str, Tensor]:
    """How each thing moves and when it came, row 0 for none: [1 + THINGS] each."""
    found = {name: torch.full((1 + THINGS,), IGNORE) for name in NAMED}
    for i in range(table.count):
        move = table.world[i, 1] - table.world[i, 0]
        main = int(np.abs(move).argmax())
        found["way"][i + 1] = 2 * main + int(move[main] > 0)
        found["fast"][i + 1] = int(np.hypot(*move) > 2.6 * 2)
        found["born"][i + 1] = int(table.alive[i].argmax())
    return found


def count_labels(table: Table) -> Tensor:
    """Things that have come into sight up to and including each frame: [T]."""
    seen = np.stack([table.clear(i) for i in range(THINGS)])  # [THINGS, T]
    return torch.from_numpy(np.maximum.accumulate(seen, 1).sum(0))
