"""Idefics3 and SmolVLM: tiles of an image with text between them in the prompt, the overview last.

The encoder gets the tiles of a prompt in one row; only the prompt tells to which image they belong.
The text in front of a run of placeholders marks the overview, which ends its image. A clip of
SmolVLM is a series of pictures with a timestamp in front of each, and is one item.
Papers: arXiv 2408.12637 (Idefics3), 2504.05299 (SmolVLM).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import RELEASE
from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.prompt_ids import Span, ids_of, runs
from mmfast.models.families.tiles import tile_raster

# Between two frames stands "\nFrame from 00:01:" and nothing else: 18 letters, fewer tokens.
# Between two clips stands a sentence about the second one.
_LONGEST = 24
# `(token ids of a prompt, its images)` to groups of images, each an item.
Grouping = Callable[[list[int], list[list[Span]]], list[list[list[Span]]]]


def adapter(family: str, group: Grouping, media: tuple[str, ...]) -> Adapter:
    """The adapter of a family whose images form items by `group`."""

    def layout(base: Any, kind: str, call: Call) -> list[Layout]:
        if family == "smolvlm":
            _check_tiles(base)
        return layouts(base, call, group)

    def fold(base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
        """Mean over the patches `[P, C]` that pixel shuffling puts into one token."""
        scale, (_, h, w) = base.config.scale_factor, _raster(tile(base))
        pattern = "(tile h down w across) c -> (tile h w) c"
        tokens = reduce(values, pattern, "mean", h=h, w=w, down=scale, across=scale)
        return list(tokens.split([each.length for each in layout(base, kind, call)]))

    def tile_counts(base: Any, call: Call) -> list[int]:
        """Tiles per image, the overview included, or frames per clip."""
        return [each.length // tile(base).length for each in layout(base, "image", call)]

    return Adapter(family, layout, fold, recover, tile_counts=tile_counts, media=media)


def _check_tiles(base: Any) -> None:
    """Refuse tiles of SmolVLM that transformers 5.20 cuts by the size of a patch."""
    tokens, size = tile(base).length, base.config.vision_config.patch_size
    if tokens % size and RELEASE == (5, 20):
        raise ModelError(
            f"SmolVLM of transformers 5.20 reads tiles of a multiple of "
            f"{size} tokens, and this checkpoint has {tokens}; use transformers 5.21 or later"
        )


def recover(base: Any, kind: str, embeds: Tensor, _: Tensor | None) -> list[Layout] | None:
    """The tiles of a prompt come joined, and all are of one size."""
    one = tile(base)
    count, rest = divmod(len(embeds), one.length)
    return None if rest else [one] * count


def layouts(base: Any, call: Call, group: Grouping) -> list[Layout]:
    """One layout per item of the prompts; per tile where the prompts are not known."""
    one, ids = tile(base), ids_of(call)
    # A tile of zeros is padding.
    counts = (torch.count_nonzero(call["pixel_values"].flatten(2), dim=-1) > 0).sum(1).tolist()
    spans = [] if ids is None else _spans(ids.cpu() == base.config.image_token_id, one, counts)
    if ids is None or sum(map(len, spans)) != sum(counts):
        return [one] * sum(counts)  # and stock code says what is wrong
    found: list[Layout] = []
    for tokens, mine in zip(ids.tolist(), spans, strict=True):
        found += [_mosaic(tokens, each, one) for each in group(tokens, _images(tokens, mine))]
    return found


def tile(base: Any) -> Layout:
    """One tile, or one frame."""
    vision = base.config.vision_config
    side = vision.image_size // vision.patch_size // base.config.scale_factor
    return Layout(side * side, (1, side, side))


def _raster(layout: Layout) -> tuple[int, int, int]:
    assert layout.grid is not None
    return layout.grid


def _spans(here: Tensor, one: Layout, counts: list[int]) -> list[list[Span]]:
    """The tiles of each prompt; rows of the pixels may be prompts or clips."""
    spans = [[span for span in runs(row) if span[1] - span[0] == one.length] for row in here]
    if sum(map(len, spans)) > sum(counts) and len(spans) == len(counts):
        # Earlier turns stand in front.
        return [mine[max(0, len(mine) - n) :] for mine, n in zip(spans, counts, strict=True)]
    return spans


def _images(ids: list[int], spans: list[Span]) -> list[list[Span]]:
    """Runs of placeholders by image: every overview ends one.

    The last run of a prompt is an overview, and so are those with the same tag in front. Two
    tokens are compared, so that a tag of several tokens is recognised as well.
    """
    found: list[list[Span]] = [[]]
    for span in spans:
        found[-1].append(span)
        if _tag(ids, span) == _tag(ids, spans[-1]):
            found.append([])
    return [image for image in found if image]


def _tag(ids: list[int], span: Span) -> list[int]:
    return ids[max(0, span[0] - 2) : span[0]]


def _mosaic(ids: list[int], group: list[list[Span]], one: Layout) -> Layout:
    """Layout of one image: its tiles row by row, then the overview; or of the frames of a clip."""
    spans, (_, *side) = group[0], _raster(one)
    if len(spans) == 1:
        return Layout(len(group) * one.length, (len(group), side[0], side[1]))
    # Within a row of tiles the next tag follows at once, which begins as every image ends.
    end = ids[spans[-1][1] : spans[-1][1] + 1]
    breaks = sum(ids[a[1] : a[1] + 1] != end for a, _ in pairwise(spans[:-1]))
    rows, tiles = breaks + 1, len(spans) - 1
    shape = (rows, tiles // rows) if tiles % rows == 0 else (1, tiles)
    numbers, places = tile_raster(shape, (side[0], side[1]), "last")
    return Layout(len(numbers), None, tiles=numbers, places=places)


def each_alone(ids: list[int], images: list[list[Span]]) -> list[list[list[Span]]]:
    """Every image is an item."""
    return [[image] for image in images]


def clips(ids: list[int], images: list[list[Span]]) -> list[list[list[Span]]]:
    """The frames of a clip together, everything else alone."""
    groups: list[list[list[Span]]] = []
    for image in images:
        last = groups[-1][-1] if groups else []
        if len(image) == len(last) == 1 and _follows(ids, last[0], image[0]):
            groups[-1].append(image)
        else:
            groups.append([image])
    return groups


def _follows(ids: list[int], a: Span, b: Span) -> bool:
    """Return True for neighbours in a clip: both are stamped, with little between them."""
    return b[0] - a[1] <= _LONGEST and _stamped(ids, a) and _stamped(ids, b)


def _stamped(ids: list[int], span: Span) -> bool:
    """Return True where `mm:ss:`, a token each, stands in front of a picture's opening tags."""
    opening = ids[span[1] : span[1] + 1]  # the tag that closes a picture opens it, too
    first = span[0] - 1
    while first >= 0 and ids[first : first + 1] != opening:
        first -= 1
    stamp = ids[max(0, first - 6) : max(0, first)]
    colons = stamp[2:3] == stamp[5:6]
    return len(stamp) == 6 and colons and stamp[2] not in (stamp[i] for i in (0, 1, 3, 4))


add_adapter(adapter("idefics3", each_alone, ("image",)))
add_adapter(adapter("smolvlm", clips, ("image", "video")))
