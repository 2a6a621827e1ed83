"""Extra losses of the decoder's training: things by name, all of them, and edges of boxes.

A box is four numbers of two digits. Cross entropy takes 39 for as wrong as 00 where 40 is right,
so the digits of a box have a target that is blurred over the numbers around the right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, rms_norm

from mmfast.tiny.scenes.facts import born, gone
from mmfast.tiny.video.lessons import PackedQuestions
from mmfast.tiny.video.scene import COLOURS, IGNORE, SAMPLED, SHAPES, SIDE, THINGS, Table

ALL = 1 + THINGS  # mark of the place at which an answer about all things begins
NAMES = len(SHAPES) * len(COLOURS)
FACTS = 8  # numbers about a thing: first place, last place, velocity, when it comes and goes
BLUR = 1.5  # standard deviation of the targets of edges, which are 00 to 99
STRIDE = 8.0  # velocity of a fast thing, in units of a 96 picture and frame
LAYERS = (2, 3)  # after which a name is read, after which a box is read
WEIGHT = 4.0  # of a mean distance, which is a few hundredths
SPARSE = 0.2  # of the names that are there and those that are not, summed


def names_there(table: Table | None, frame: int | None = None) -> Tensor:
    """Names that things have, in a frame or any: 1, others 0, nan = unknown. `[NAMES]`."""
    if table is None:
        return torch.full((NAMES,), float("nan"))
    alive = table.alive if frame is None else table.alive[:, frame : frame + 1]
    found = torch.zeros(NAMES)
    numbers = [name_number(table, i) for i in range(table.count) if alive[i].any()]
    found[numbers] = 1.0
    return found


def name_number(table: Table, thing: int) -> int:
    """Number of the name of a thing: those of a shape stand together."""
    return int(table.shape[thing]) * len(COLOURS) + int(table.colour[thing])


def thing_numbers(table: Table | None, frame: int | None = None) -> Tensor:
    """Numbers that the names of things should tell, nan = unknown: `[1 + THINGS, FACTS]`."""
    found = np.full((1 + THINGS, FACTS), np.nan, np.float32)
    if table is None:
        return torch.from_numpy(found)
    for i in range(table.count):
        if frame is not None:
            if table.alive[i, frame]:
                found[1 + i, :4] = np.tile(table.place[i, frame] / SIDE, 2)
            continue
        if not table.alive[i].any():
            continue
        first, end = born(table, i), gone(table, i)
        speed = (table.world[i, 1] - table.world[i, 0]) / STRIDE
        places = (table.place[i, first] / SIDE, table.place[i, end - 1] / SIDE)
        found[1 + i] = [*places[0], *places[1], *speed, first / SAMPLED, end / SAMPLED]
    return torch.from_numpy(found)


class SceneReadout(nn.Module):
    """Reads numbers from the decoder's states; of no use after the training."""

    digits: Tensor  # ids of 0 to 9
    values: Tensor  # digit of each id, -1 = none

    def __init__(self, width: int, digits: Sequence[int], comma: int) -> None:
        super().__init__()
        self.names, self.boxes = nn.Linear(width, FACTS), nn.Linear(width, 4)
        self.there = nn.Linear(width, NAMES)
        for read in (
            self.names,
            self.boxes,
            self.there,
        ):
            # At first the decoder feels nothing of them.
            nn.init.zeros_(read.weight)
        self.comma = comma
        values = torch.full((max(digits) + 1,), -1)
        values[list(digits)] = torch.arange(10)
        self.register_buffer("digits", torch.tensor(digits), persistent=False)
        self.register_buffer("values", values, persistent=False)

    def edges(self, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, places and edges `[n, 4]` of the boxes that begin there: labels `[B, L]`."""
        mark = labels == self.comma
        begins = mark[:, 2:-9] & mark[:, 5:-6] & mark[:, 8:-3]
        rows, places = begins.nonzero(as_tuple=True)
        at = places[:, None] + 3 * torch.arange(4, device=labels.device)
        tens, units = (self.values[labels[rows[:, None], at + k]] for k in (0, 1))
        return rows, places, 10 * tens + units

    def answers(self, model: Any, states: Tensor, packed: PackedQuestions) -> Tensor:
        """Loss of each answer token, blurred for edges: states `[B, L, D]` to `[n]`."""
        asked = packed.labels != IGNORE
        logits = model.lm_head(states[asked]).float()
        each = cross_entropy(logits, packed.labels[asked], reduction="none")
        rows, places, edges = self.edges(packed.labels)
        if not len(rows):
            return each
        count = partial(torch.arange, device=states.device)
        order = torch.full(asked.shape, -1, device=states.device)
        order[asked] = count(len(each))
        at = order[rows, places][:, None] + 3 * count(4)  # [n, 4]
        gap = count(100) - edges[..., None]
        mass = torch.exp(-0.5 * (gap / BLUR) ** 2).unflatten(-1, (10, 10))  # tens, units
        units = mass.gather(-2, (edges // 10)[..., None, None].expand(-1, -1, 1, 10)).squeeze(-2)
        for shift, target in ((0, mass.sum(-1)), (1, units)):
            spots = (at + shift).flatten()
            guess = logits[spots].log_softmax(-1)[:, self.digits]
            wanted = (target / target.sum(-1, keepdim=True)).flatten(0, 1)
            each = each.index_put((spots,), -(wanted * guess).sum(-1))
        return each

    def loss(
        self, layers: Sequence[Tensor], packed: PackedQuestions, things: Mapping[str, Tensor]
    ) -> Tensor:
        """Mean distance of what names and boxes tell, and cross entropy of what is there.

        States of layers `[B, P + L, D]`; the `things` of a lesson.
        """
        split = layers[0].shape[1] - packed.ids.shape[1]
        states = (layers[at][:, split:].float() for at in LAYERS)
        named, boxed = (rms_norm(x, x.shape[-1:]) for x in states)
        lines, at = ((packed.named > 0) & (packed.named < ALL)).nonzero(as_tuple=True)
        truth = things["numbers"][lines, packed.named[lines, at]]
        known = ~truth.isnan()
        rows, places, edges = self.edges(packed.labels)
        gaps = [
            (self.names(named[lines, at]).float() - truth.nan_to_num())[known],
            (self.boxes(boxed[rows, places]).float() - edges / 100).flatten(),
        ]
        total = WEIGHT * sum((gap.abs().mean() for gap in gaps if len(gap)), named.new_zeros(()))
        lines, at = (packed.named == ALL).nonzero(as_tuple=True)
        if not len(lines):
            return total
        told = self.there(named[lines, at]).float()
        wrong = binary_cross_entropy_with_logits(told, things["there"][lines], reduction="none")
        return total + SPARSE * wrong.sum(-1).mean()
