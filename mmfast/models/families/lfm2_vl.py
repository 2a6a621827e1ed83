"""LFM2-VL: tiles of any aspect ratio, squares of patches joined into tokens, images only.

Model card: huggingface.co/LiquidAI/LFM2-VL-1.6B. The tower gets a tile per row, padded to the
longest. A large image is cut into tiles, a tag in front of each, and an overview at the end; the
prompt tells which tiles are one image. Decoder layers that are convolutions run over the tokens
that are left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.prompt_ids import Span, ids_of, runs

Raster = tuple[int, int]  # rows and columns of a tile's tokens


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One layout per image; per tile where the prompts are not known."""
    found = []
    for tiles in _images(base, call):
        if len(tiles) == 1:
            found.append(Layout(math.prod(tiles[0]), (1, *tiles[0])))
            continue
        numbers = [*range(1, len(tiles)), 0]  # the overview comes last
        owner = [n for n, tile in zip(numbers, tiles, strict=True) for _ in range(math.prod(tile))]
        found.append(Layout(len(owner), None, tiles=tuple(owner)))
    return found


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches of a token: `[P, C]`, tiles padded, to one `[N, C]` per image."""
    factor, shapes = base.config.downsample_factor, call["spatial_shapes"].tolist()
    folded = []
    for tile, (h, w) in zip(values.chunk(len(shapes)), shapes, strict=True):
        pattern, own = "(h down w across) c -> (h w) c", tile[: h * w]
        folded.append(reduce(own, pattern, "mean", h=h // factor, down=factor, across=factor))
    return [torch.cat(tiles) for tiles in _split(folded, tile_counts(base, call))]


def _split(tiles: list[Tensor], counts: list[int]) -> Iterator[list[Tensor]]:
    left = iter(tiles)
    yield from (list(islice(left, count)) for count in counts)


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles per image, the overview included."""
    return [len(tiles) for tiles in _images(base, call)]


def _images(base: Any, call: Call) -> list[list[Raster]]:
    """The tiles of each image: those that one tag parts."""
    factor, ids = base.config.downsample_factor, ids_of(call)
    tiles = [(h // factor, w // factor) for h, w in call["spatial_shapes"].tolist()]
    spans: list[tuple[int, Span]] = []
    for row, here in enumerate(() if ids is None else ids.cpu() == base.config.image_token_id):
        spans += [(row, span) for span in runs(here)]
    if ids is not None and len(ids) == 1:
        spans = spans[max(0, len(spans) - len(tiles)) :]  # earlier turns stand in front
    if [stop - start for _, (start, stop) in spans] != [math.prod(tile) for tile in tiles]:
        return [[tile] for tile in tiles]
    images: list[list[Raster]] = []
    for index, tile in enumerate(tiles):
        row, (start, _) = spans[index]
        before, (_, stop) = spans[index - 1]
        if index and row == before and start - stop == 1:
            images[-1].append(tile)
        else:
            images.append([tile])
    return images


add_adapter(Adapter("lfm2_vl", layout, fold, tile_counts=tile_counts, media=("image",)))
