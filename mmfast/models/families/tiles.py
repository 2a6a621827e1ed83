"""Images cut into tiles: the layout of an overview followed by a mosaic with a newline per row.

A family packs an image in its own code; running that code on marks instead of features shows
where everything went. So a layout cannot drift away from the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mmfast.models.families.adapter import Layout, raster_places

NEWLINE = -1.0


def mosaic_layouts(
    pack: Callable[[list[Tensor], Tensor], Sequence[Tensor]],
    shapes: Sequence[tuple[int, int] | None],
    side: int,
) -> list[Layout]:
    """Layouts of images that were cut into tiles of `side` tokens, newline tokens as separators.

    `pack` is the family's packing: features per image `[tiles, side * side, C]` (overview first)
    and a newline `[C]` to `[length, C]`; `shapes` has rows and columns of tiles, None for one tile.
    An overview token lies in the overview's own raster, the others in that of the mosaic as packed.
    """
    marks = [_marks(shape, side) for shape in shapes]
    packed = pack(marks, torch.full((2,), NEWLINE))
    return [_layout(rows.cpu(), shape, side) for rows, shape in zip(packed, shapes, strict=True)]


def _marks(shape: tuple[int, int] | None, side: int) -> Tensor:
    """Row and column of each patch in the mosaic, `[tiles, side * side, 2]`; overview 0."""
    overview = torch.zeros(1, side * side, 2)
    if shape is None:
        return overview
    rows, columns = shape
    tile = torch.arange(rows * columns)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    down = (tile // columns * side)[:, None] + y.flatten()
    across = (tile % columns * side)[:, None] + x.flatten()
    return torch.cat([overview, torch.stack([down, across], -1).float()])


def _layout(rows: Tensor, shape: tuple[int, int] | None, side: int) -> Layout:
    newline = rows[:, 0] == NEWLINE
    separators = tuple(newline.nonzero()[:, 0].tolist())
    if shape is None:
        grid = (1, side, side) if int((~newline).sum()) == side * side else None
        return Layout(len(rows), grid, separators)
    overview = side * side
    content = rows[~newline][overview:]  # [mosaic, 2]; resampled ones lie between two patches
    tile = (content + 0.5).floor().long() // side
    number = 1 + tile[:, 0] * shape[1] + tile[:, 1]
    tiles = torch.cat([torch.zeros(overview, dtype=torch.long), number])
    places = mosaic_places(len(rows), separators, side)
    return Layout(len(rows), None, separators, tuple(tiles.tolist()), places)


def mosaic_places(length: int, separators: Sequence[int], side: int) -> Tensor:
    """`(0, y, x)` of the content tokens, `[N, 3]`: an overview, then rows that end in a newline."""
    overview, height = side * side, max(1, len(separators))
    width = (length - len(separators) - overview) // height
    return torch.cat([raster_places((1, side, side)), raster_places((1, height, width))])


def tile_raster(
    shape: tuple[int, int], side: tuple[int, int], overview: str | None = "first"
) -> tuple[tuple[int, ...], Tensor]:
    """`tiles` and `places` of a `Layout` whose tiles follow each other whole.

    `shape` counts tiles, `side` the tokens of a tile; the overview comes `first`, `last` or not.
    """
    h, w = side
    inside = raster_places((1, h, w))
    corner = torch.tensor([[0, r * h, c * w] for r in range(shape[0]) for c in range(shape[1])])
    places = (corner[:, None] + inside).flatten(0, 1)
    tiles = torch.arange(1, len(corner) + 1).repeat_interleave(h * w)
    whole = torch.zeros(h * w, dtype=torch.long)
    parts = {
        "first": ([whole, tiles], [inside, places]),
        "last": ([tiles, whole], [places, inside]),
    }
    numbers, where = parts.get(overview or "", ([tiles], [places]))
    return tuple(torch.cat(numbers).tolist()), torch.cat(where)
