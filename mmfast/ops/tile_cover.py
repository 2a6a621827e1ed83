"""Which tile of an image covers each token of its overview."""

from __future__ import annotations

import torch
from torch import Tensor


def tile_cover(tile: Tensor, place: Tensor | None) -> Tensor:
    """The tile that shows what each overview token shows, `[n0]`; -1 where no tile does.

    With places, the tiles lie in one mosaic over the whole image and the overview is scaled onto
    it. Without, or where the places of two tiles overlap (each counts from its own corner), the
    overview is cut into as many consecutive runs as there are tiles.

    Args:
        tile: `[N]` int64, tile of each token; 0 is the overview. At least one other tile.
        place: `[N, 3]` int64, frame, row and column, or None.
    """
    overview = tile == 0
    numbers = tile[~overview].unique()
    if place is not None:
        boxes = torch.stack([_box(place[tile == number]) for number in numbers])
        if not _overlapping(boxes):
            return _by_place(place[overview], boxes, numbers)
    n = int(overview.sum())
    run = torch.arange(n, device=tile.device) * len(numbers) // max(n, 1)
    covering: Tensor = numbers[run]
    return covering


def _box(place: Tensor) -> Tensor:
    """Rows and columns that places `[n, 3]` span: `[top, left, bottom + 1, right + 1]`."""
    return torch.cat([place.amin(0)[1:], place.amax(0)[1:] + 1])


def _overlapping(boxes: Tensor) -> bool:
    """Whether any two of the boxes `[P, 4]` share a cell."""
    low = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    high = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    shared = (low < high).all(-1).fill_diagonal_(False)
    return bool(shared.any())


def _by_place(overview: Tensor, boxes: Tensor, numbers: Tensor) -> Tensor:
    if not len(overview):
        return numbers[:0]
    own = _box(overview)
    corner, end = boxes[:, :2].amin(0), boxes[:, 2:].amax(0)
    # Twice the centre of each token, scaled in whole numbers: no rounding at the seams.
    size = own[2:] - own[:2]
    centre = (2 * (overview[:, 1:] - own[:2]) + 1) * (end - corner)  # [n0, 2]
    low = 2 * (boxes[None, :, :2] - corner) * size  # [1, P, 2]
    high = 2 * (boxes[None, :, 2:] - corner) * size
    inside = ((low <= centre[:, None]) & (centre[:, None] < high)).all(-1)  # [n0, P]
    return numbers[inside.byte().argmax(-1)].masked_fill(~inside.any(-1), -1)
