"""Read-outs inside the decoder that make it learn pages sooner; thrown away after training.

One answer a question says little about 1,475 visual tokens. So each token owes in which cell of the
page it lies, a thing's token the number beside the thing, and a number's token what it belongs to,
each where that was earlier in the sequence: a token has not seen what comes after it.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmfast.tiny.labels import IGNORE
from mmfast.tiny.pages import CELLS, Page
from mmfast.tiny.scene import COLOURS, SHAPES
from mmfast.tiny.table import PATCHES

PARTS = {
    "row": CELLS,
    "column": CELLS,
    "tens": 10,
    "units": 10,
    "colour": len(COLOURS),
    "shape": len(SHAPES),
}


def page_labels(page: Page) -> Tensor:
    """Labels of every visual token but the last newline, `[parts, tokens]`, IGNORE where none."""
    side = CELLS * PATCHES
    maps = np.full((len(PARTS), side, side), IGNORE)
    at = np.arange(side) // PATCHES
    maps[0], maps[1] = at[:, None], at[None, :]
    order = np.arange(side * side).reshape(side, side)
    for number, entry in enumerate(page.entries, start=1):
        thing, panel = page.things == number, page.panels == number
        if entry.number is None or not thing.any() or not panel.any():
            continue
        late = thing & (order > order[panel].mean())
        maps[2][late], maps[3][late] = divmod(entry.number, 10)
        late = panel & (order > order[thing].mean())
        maps[4][late] = tuple(COLOURS).index(entry.colour)
        maps[5][late] = SHAPES.index(entry.shape)
    lines = np.concatenate([maps, np.full((len(PARTS), side, 1), IGNORE)], 2)  # newlines
    overview = np.full((len(PARTS), PATCHES**2), IGNORE)
    flat = np.concatenate([overview, lines.reshape(len(PARTS), -1)[:, :-1]], 1)
    return torch.from_numpy(flat)


class PageHead(nn.Module):
    """What the states of visual tokens must say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read = nn.Linear(width, sum(PARTS.values()))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Loss on states `[B, M, D]` of kept tokens with labels `[parts, B, M]`."""
        total = x.new_zeros(())
        for out, label in zip(self.read(x).split(list(PARTS.values()), -1), labels, strict=True):
            if (label != IGNORE).any():
                total = total + cross_entropy(out.flatten(0, 1), label.flatten())
        return total
