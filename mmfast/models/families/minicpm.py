"""MiniCPM-V 4.6: an overview and slices of any shape, a token for 4 x 4 patches or for 2 x 2.

Model card: huggingface.co/openbmb/MiniCPM-V-4_6. The tower gets the patches of all pictures in one
sequence and merges some between two of its blocks, so its attention is not read. The prompt tells
which slices are one image: the tag in front of the first run of a prompt is that of overviews.
Frames of a clip and their slices follow each other with two tags between them, or a line break.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter, raster_places
from mmfast.models.families.prompt_ids import ids_of, runs
from mmfast.models.families.tiles import tile_raster
from mmfast.models.families.tower import argument, blockless

Raster = tuple[int, int]
Picture = list[tuple[Raster, list[int]]]  # its rasters, each with the tokens in front of it


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One layout per image or clip; per picture where the prompts are not known."""
    return [_layout(kind, picture) for picture in _pictures(base, kind, call)]


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches `[P, C]` of a token, one `[N, C]` per item."""
    merge, folded = _merge(base, call), []
    for picture in _pictures(base, kind, call):
        rows = []
        for (h, w), _ in picture:
            patches, values = values.tensor_split([h * w * merge**2])
            pattern = "(h down w across) c -> (h w) c"
            rows.append(reduce(patches, pattern, "mean", h=h, w=w, down=merge, across=merge))
        folded.append(torch.cat(rows))
    return folded


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles of each image, the overview included."""
    return [len(picture) for picture in _pictures(base, "image", call)]


def _merge(base: Any, call: Call) -> int:
    times = base.config.merger_times + (argument(base, call, "downsample_mode") != "4x")
    return int(base.config.merge_kernel_size[0] ** times)


def _layout(kind: str, picture: Picture) -> Layout:
    rasters = [raster for raster, _ in picture]
    tags = {tuple(gap[-1:]) for _, gap in picture}  # of frames alone, or of slices, too
    if len(set(rasters)) == 1 and (len(rasters) == 1 or (kind == "video" and len(tags) == 1)):
        return Layout(len(rasters) * math.prod(rasters[0]), (len(rasters), *rasters[0]))
    numbers = [n for n, raster in enumerate(rasters) for _ in range(math.prod(raster))]
    if kind == "video":
        return Layout(len(numbers), None)
    # Within a row a slice follows at once; a line break parts rows.
    rows = 1 + sum(len(gap) > 2 for _, gap in picture[2:])
    shape, overview = (rows, (len(rasters) - 1) // rows), raster_places((1, *rasters[0]))
    _, slices = tile_raster(shape, rasters[1], None)
    places = torch.cat([overview, slices]) if len(set(rasters[1:])) == 1 else None
    return Layout(len(numbers), None, tiles=tuple(numbers), places=places)


def _pictures(base: Any, kind: str, call: Call) -> list[Picture]:
    """The pictures of each image or clip."""
    sizes = call["target_sizes" if kind == "image" else "target_sizes_videos"]
    merge, ids = _merge(base, call), ids_of(call)
    rasters = [(h // merge, w // merge) for h, w in sizes.tolist()]
    found: list[list[tuple[int, list[int]]]] = []
    for row in () if ids is None else ids.tolist():
        found += _of_prompt(row, getattr(base.config, f"{kind}_token_id"), kind)
    if ids is not None and len(ids) == 1:  # earlier turns may stand in front
        while found and sum(map(len, found)) > len(rasters):
            del found[0]
    if [n for each in found for n, _ in each] != [math.prod(raster) for raster in rasters]:
        return [[(raster, [])] for raster in rasters]
    left = iter(rasters)
    return [[(next(left), gap) for _, gap in each] for each in found]


def _of_prompt(ids: list[int], token: int, kind: str) -> list[list[tuple[int, list[int]]]]:
    """Runs of placeholders by item: how many there are, and the tokens in front of each."""
    found: list[list[tuple[int, list[int]]]] = []
    spans = runs(torch.tensor(ids) == token)
    for index, (start, stop) in enumerate(spans):
        gap = ids[spans[index - 1][1] if index else 0 : start]
        same = len(gap) <= 3 if kind == "video" else gap[-1:] != ids[spans[0][0] - 1 : spans[0][0]]
        if index and same:
            found[-1].append((stop - start, gap))
        else:
            found.append([(stop - start, gap)])
    return found


add_adapter(
    Adapter("minicpmv4_6", layout, fold, tower=blockless, tile_counts=tile_counts, resizes=True)
)
