"""Idefics3: tiles of an image with text between them in the prompt, the overview last.

The encoder gets the tiles of a prompt in one row without a word about whose they are; the prompt
tells: the text in front of a run of placeholders marks the overview, which ends its image.
Paper: arXiv 2408.12637.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.prompt_ids import Span, ids_of, runs
from mmfast.models.families.tiles import tile_raster


def layout(base: Any, kind: str, call: Call) -> list[Layout]:
    """One layout per image of the prompts; per tile where the prompts are not known."""
    return layouts(base, call, lambda ids, found: [[image] for image in found])


def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
    """Mean over the patches `[P, C]` that pixel shuffling puts into one token."""
    return fold_as(layout(base, kind, call), base, values)


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> list[Layout] | None:
    """The tiles of a prompt come joined, and all are of one size."""
    one = tile(base)
    count, rest = divmod(len(embeds), one.length)
    return None if rest else [one] * count


def tile_counts(base: Any, call: Call) -> list[int]:
    """Tiles per image, the overview included."""
    return [each.length // tile(base).length for each in layout(base, "image", call)]


Groups = Callable[[list[int], list[list[Span]]], list[list[list[Span]]]]


def layouts(base: Any, call: Call, clips: Groups) -> list[Layout]:
    """Layouts of all prompts; `clips(ids, images)` puts the frames of each clip together."""
    one, ids = tile(base), ids_of(call)
    counts = real_tiles(call["pixel_values"]).sum(1).tolist()
    spans = [] if ids is None else _spans(ids.cpu() == base.config.image_token_id, one, counts)
    if ids is None or sum(map(len, spans)) != sum(counts):
        return [one] * sum(counts)  # and stock code says what is wrong
    found: list[Layout] = []
    for tokens, mine in zip(ids.tolist(), spans, strict=True):
        found += [mosaic(tokens, group, one) for group in clips(tokens, images(tokens, mine))]
    return found


def _spans(here: Tensor, one: Layout, counts: list[int]) -> list[list[Span]]:
    """The tiles of each prompt; rows of the pixels may be prompts or clips."""
    spans = [[span for span in runs(row) if span[1] - span[0] == one.length] for row in here]
    if sum(map(len, spans)) > sum(counts) and len(spans) == len(counts):
        # Earlier turns stand in front.
        return [mine[max(0, len(mine) - n) :] for mine, n in zip(spans, counts, strict=True)]
    return spans


def fold_as(found: list[Layout], base: Any, values: Tensor) -> list[Tensor]:
    """Patches of tiles `[P, C]` to tokens, one `[N, C]` for each of the layouts."""
    grid = tile(base).grid
    assert grid is not None
    _, h, w = grid
    scale = base.config.scale_factor
    blocks = values.reshape(-1, h, scale, w, scale, values.shape[-1])
    tokens = blocks.mean((2, 4)).flatten(0, 2)
    return list(tokens.split([each.length for each in found]))


def images(ids: list[int], spans: list[Span]) -> list[list[Span]]:
    """Runs of placeholders by image: every overview ends one.

    The last run of a prompt is an overview, and so are those with the same tag in front. Two
    tokens are compared, so that a tag that is no token of its own is told apart, too.
    """
    found: list[list[Span]] = [[]]
    for span in spans:
        found[-1].append(span)
        if _tag(ids, span) == _tag(ids, spans[-1]):
            found.append([])
    return [image for image in found if image]


def mosaic(ids: list[int], group: list[list[Span]], one: Layout) -> Layout:
    """Layout of one image: its tiles row by row, then the overview; or of the frames of a clip."""
    spans = group[0]
    assert one.grid is not None
    if len(spans) == 1:
        return Layout(len(group) * one.length, (len(group), *one.grid[1:]))
    # Within a row of tiles the next tag follows at once, which begins as every image ends.
    end = ids[spans[-1][1] : spans[-1][1] + 1]
    breaks = sum(ids[a[1] : a[1] + 1] != end for a, _ in pairwise(spans[:-1]))
    rows, tiles = breaks + 1, len(spans) - 1
    shape = (rows, tiles // rows) if tiles % rows == 0 else (1, tiles)
    numbers, places = tile_raster(shape, one.grid[1:], "last")
    return Layout(len(numbers), None, tiles=numbers, places=places)


def real_tiles(pixels: Tensor) -> Tensor:
    """`[B, T]` True where a tile `[B, T, C, H, W]` is not padding."""
    return torch.count_nonzero(pixels.flatten(2), dim=-1) > 0


def tile(base: Any) -> Layout:
    """One tile, or one frame."""
    vision = base.config.vision_config
    side = vision.image_size // vision.patch_size // base.config.scale_factor
    return Layout(side * side, (1, side, side))


def _tag(ids: list[int], span: Span) -> list[int]:
    return ids[max(0, span[0] - 2) : span[0]]


add_adapter(Adapter("idefics3", layout, fold, recover, tile_counts=tile_counts, media=("image",)))
