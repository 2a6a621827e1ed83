"""InternVL: tiles of a fixed size, every 2 x 2 patches one token; frames of a clip are tiles too.

Paper: arXiv 2504.10479. The encoder gets the tiles of all images and clips in one row, so only the
prompt tells which belong together: the tiles of an image lie side by side in it, and the frames
of a clip are numbered (see mmfast/models/families/prompt_ids.py).
"""

from __future__ import annotations

import math
from typing import Any

from einops import rearrange, reduce
from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter, square
from mmfast.models.families.prompt_ids import clips, ids_of


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One layout per image and clip of the prompts; per tile where the prompts are not known."""
    tile, tiles, ids = _tile(base, call), len(call["pixel_values"]), ids_of(call)
    found = (
        [] if ids is None else [each for row in ids.cpu() for each in _of_prompt(base, row, tile)]
    )
    if ids is not None and len(ids) == 1:  # earlier turns may stand in front
        while found and _count(found, tile) > tiles:
            del found[0]
    return found if _count(found, tile) == tiles else [tile] * tiles


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches `[P, C]` of a token, by the model's own pixel shuffle."""
    tiles, width = len(call["pixel_values"]), values.shape[-1]
    side = math.isqrt(len(values) // tiles)
    raster = rearrange(values, "(tile h w) c -> tile h w c", tile=tiles, h=side)
    shuffled = base.pixel_shuffle(raster, base.config.downsample_ratio)
    rows = reduce(shuffled, "tile h w (patch c) -> (tile h w) c", "mean", c=width)
    return list(rows.split([each.length for each in layout(base, kind, call)]))


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles of each image, and frames of each clip."""
    return [_count([each], _tile(base, call)) for each in layout(base, "image", call)]


def _tile(base: Any, call: Call) -> Layout:
    patch = base.config.vision_config.patch_size
    pixels = call["pixel_values"].shape[-2:]
    rows, columns = (
        int(n // p * base.config.downsample_ratio) for n, p in zip(pixels, patch, strict=True)
    )
    return Layout(rows * columns, (1, rows, columns))


def _count(layouts: list[Layout], tile: Layout) -> int:
    return sum(each.length for each in layouts) // tile.length


def _of_prompt(base: Any, ids: Tensor, tile: Layout) -> list[Layout]:
    """Layouts of the images and clips of one prompt `[L]`.

    An image of several tiles ends with its overview. Pictures that a prompt numbers line by line
    and that have one tile each look like frames, and are taken for a clip.
    """
    assert tile.grid is not None
    found = []
    for spans in clips(ids, ids == base.config.image_token_id, tile.length):
        count = sum(stop - start for start, stop in spans) // tile.length
        if len(spans) > 1 or count == 1:
            found.append(Layout(count * tile.length, (count, *tile.grid[1:])))
        else:
            numbers = [n for n in (*range(1, count), 0) for _ in range(tile.length)]
            found.append(Layout(len(numbers), None, tiles=tuple(numbers)))
    return found


add_adapter(Adapter("internvl", layout, fold, square, tile_counts=tile_counts, resizes=True))
