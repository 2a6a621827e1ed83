"""Families whose encoder gets the tiles of all pictures in one row, each tile a square of tokens.

Aya Vision (arXiv 2505.08751), Command A Vision, Ovis2 (arXiv 2405.20797), GOT-OCR2 (arXiv
2409.01704) and Perception LM (arXiv 2504.13180), whose pictures of a call have as many tiles each.
Elsewhere only the prompt tells which tiles are one picture: what stands between two of them there.
Squares of patches become a token; GOT-OCR2 and Perception LM have towers without attention that
could be read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from einops import reduce
from torch import Tensor

from mmfast.models.families.adapter import Adapter, Call, Layout, add_adapter
from mmfast.models.families.prompt_ids import ids_of, runs
from mmfast.models.families.tiles import tile_raster
from mmfast.models.families.tower import blockless

Gaps = list[list[int]]  # token ids between the tiles of a picture


@dataclass(frozen=True)
class Tiling:
    """The way a family cuts pictures.

    Attributes:
        merge: `(base) -> int`: patches per side of a token.
        joins: `(ids between two tiles, ids behind the last tile of the prompt) -> bool`: both are
            of one picture.
        overview: Where it stands, `first` or `last`.
        rows: `(base, gaps) -> int`: rows of tiles; 0 where the prompt does not tell.
        counts: `(base, call) -> list[int]` or None: tiles of each picture without a prompt.
    """

    merge: Callable[[Any], int]
    joins: Callable[[list[int], list[int]], bool]
    overview: str = "last"
    rows: Callable[[Any, Gaps], int] = lambda *_: 0
    counts: Callable[[Any, Call], list[int]] | None = None

    def layout(self, base: Any, kind: str, call: Call) -> list[Layout]:
        """One layout per picture; per tile where the prompts are not known."""
        side = self.side(base, call)
        return [self._layout(base, side, *each) for each in self._pictures(base, call)]

    def fold(self, base: Any, kind: str, values: Tensor, call: Call) -> list[Tensor]:
        """Mean over the patches `[P, C]` of a token, one `[N, C]` per picture."""
        counts, merge = self.tile_counts(base, call), self.merge(base)
        side = self.side(base, call)
        pattern = "(tile h down w across) c -> tile (h w) c"
        rows = reduce(values, pattern, "mean", h=side, w=side, down=merge, across=merge)
        return [each.flatten(0, 1) for each in rows.split(counts)]

    def tile_counts(self, base: Any, call: Call) -> list[int]:
        """Tiles per picture, the overview included."""
        return [count for count, _ in self._pictures(base, call)]

    def side(self, base: Any, call: Call) -> int:
        """Tokens per side of a tile."""
        patch = getattr(base.config.vision_config, "patch_size", None)
        if patch is None:  # of timm
            patch = base.vision_tower.timm_model.patch_embed.patch_size[0]
        return int(call["pixel_values"].shape[-1] // patch) // self.merge(base)

    def _layout(self, base: Any, side: int, count: int, gaps: Gaps) -> Layout:
        if count == 1:
            return Layout(side * side, (1, side, side))
        rows = self.rows(base, gaps)
        shape = (rows or 1, (count - 1) // (rows or 1))
        numbers, places = tile_raster(shape, (side, side), self.overview)
        return Layout(len(numbers), None, tiles=numbers, places=places if rows else None)

    def _pictures(self, base: Any, call: Call) -> list[tuple[int, Gaps]]:
        """Tiles of each picture, and what stands between them."""
        if self.counts is not None:
            return [(count, []) for count in self.counts(base, call)]
        ids, total, length = ids_of(call), len(call["pixel_values"]), self.side(base, call) ** 2
        found: list[tuple[int, Gaps]] = []
        for row in () if ids is None else ids.tolist():
            found += self._of_prompt(row, base.config.image_token_id, length)
        if ids is not None and len(ids) == 1:  # earlier turns may stand in front
            while found and sum(count for count, _ in found) > total:
                del found[0]
        fits = sum(count for count, _ in found) == total
        return found if fits else [(1, [])] * total

    def _of_prompt(self, ids: list[int], token: int, length: int) -> list[tuple[int, Gaps]]:
        spans = runs(torch.tensor(ids) == token)
        if not spans:
            return []
        end, sizes = ids[spans[-1][1] :], [(stop - start) // length for start, stop in spans]
        found: list[tuple[int, Gaps]] = [(sizes[0], [])]
        for (before, after), size in zip(pairwise(spans), sizes[1:], strict=True):
            gap = ids[before[1] : after[0]]
            if self.joins(gap, end):
                found[-1] = (found[-1][0] + size, [*found[-1][1], gap])
            else:
                found.append((size, []))
        return found


def _never(gap: list[int], end: list[int]) -> bool:
    return False


def _no_end(gap: list[int], end: list[int]) -> bool:
    """A picture ends with a token of its own, and so does the last one."""
    return gap[:1] != end[:1]


def _alone(gap: list[int], end: list[int]) -> bool:
    """One token parts the tiles of a picture, several part pictures."""
    return len(gap) == 1


def _rows_of_ovis(base: Any, gaps: Gaps) -> int:
    return 1 + gaps.count([base.config.visual_indicator_token_ids[3]])


def _stacked(base: Any, call: Call) -> list[int]:
    pictures, tiles = call["pixel_values"].shape[:2]
    return [int(tiles)] * int(pictures)


def _factor(base: Any) -> int:
    return int(base.config.downsample_factor)


def _add(family: str, tiling: Tiling, **more: Any) -> None:
    names = {"tile_counts": tiling.tile_counts, "media": ("image",), "resizes": True, **more}
    add_adapter(Adapter(family, tiling.layout, tiling.fold, **names))


_add("aya_vision", Tiling(_factor, _no_end))
_add("cohere2_vision", Tiling(_factor, _alone))
_add(
    "ovis2",
    Tiling(
        lambda base: int(base.config.vision_config.hidden_stride), _no_end, "first", _rows_of_ovis
    ),
    apart=False,  # its tags are embedded beside the pictures
)
_add("got_ocr2", Tiling(lambda base: 4, _never), tower=blockless, apart=False)
_add(
    "perception_lm",
    Tiling(lambda base: int(base.config.projector_pooling_ratio), _never, "first", counts=_stacked),
    tower=blockless,
)
