"""Reuse of patches that moved with the whole picture, for the frame cache.

Features of a patch depend on where it lies. The tower's pass over a flat picture, one colour all
over, tells by how much: features that move from `j` to `i` lose what the flat picture has at `j`
and gain what it has at `i`. That is an approximation, so its error is measured (`ReuseLimits`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.frontends.changes import Refresh, changes, left_out
from mmfast.models.families.tower import PIXELS, Tower

MOST = 0.6  # a pass of whose patches more must be computed is left to the stock blocks
STILL = 0.005  # change of a patch that sensor noise makes; such patches are not computed anew
SCENE = 0.3  # mean change left out that is another picture, whatever was measured


@dataclass(frozen=True)
class Move:
    """Origin of the patches of a frame in its base.

    `sources` `[n]` are their old places (None: everything stayed), `new` `[m]` the patches that
    were not in the picture, and `placed` how many patches (down, right) the picture has moved since
    it was last computed whole.
    """

    sources: Tensor | None
    new: Tensor
    placed: tuple[int, int]

    def carried(self, old: Tensor, flat: Tensor | None) -> Tensor:
        """Rows `[n, ...]` at their new places, given those of the flat picture `[n, ...]`."""
        if self.sources is None or flat is None:
            return old
        flat = flat.to(old)
        return old[self.sources] + (flat - flat[self.sources])


@dataclass(frozen=True)
class Reuse:
    """Parts of a frame taken from its base: the move, the rows to compute `[k]`, and what changed.

    `change` is the mean change of the patches left out, `age` the number of frames since one was
    computed whole, `known` `[n, D]` the patches of the base where they are now.
    """

    move: Move
    rows: Tensor
    known: Tensor
    change: float
    age: int
    same: bool

    def outputs(self, old: Tensor, flat: Tensor | None, exact: Tensor) -> Tensor:
        """Outputs `[n, D]` that reuse of the base's `old` ones would have; chosen rows `exact`."""
        would = self.move.carried(old.to(exact), flat)
        return would.index_copy(0, self.rows, exact[self.rows])


@dataclass(frozen=True)
class PatchRaster:
    """Patches of a frame: rows, columns, pixels of a side, and the rows in front of them."""

    rows: int
    columns: int
    side: int
    prefix: int

    @classmethod
    def of(cls, luma: Tensor, n: int, prefix: int) -> PatchRaster | None:
        """The raster of `n` rows of a picture `[H, W]`; None where they are not one."""
        height, width = luma.shape
        side = math.isqrt(height * width // max(1, n - prefix))
        if not side or (height // side) * (width // side) != n - prefix:
            return None
        return cls(height // side, width // side, side, prefix)

    def move(self, down: int, right: int, placed: tuple[int, int], device: Any) -> Move:
        """The move of all patches by `down` and `right`, leaving the prefix where it is."""
        y = torch.arange(self.rows, device=device)[:, None] - down
        x = torch.arange(self.columns, device=device)[None] - right
        inside = (y >= 0) & (y < self.rows) & (x >= 0) & (x < self.columns)
        places = torch.where(inside, y * self.columns + x, 0).flatten() + self.prefix
        before = torch.arange(self.prefix, device=device)
        new = (~inside).flatten().nonzero()[:, 0] + self.prefix
        return Move(torch.cat([before, places]), new, placed)


def lumas(tower: Tower, kind: str, arguments: Mapping[str, Any], frames: int) -> list[Tensor]:
    """Brightness `[H, W]` of each frame of a call; none where pixels are not those of frames.

    Packed patches, tiles, and pixels that come with tensors of their own have none.
    """
    pixels = arguments.get(PIXELS[kind])
    others = [v for k, v in arguments.items() if isinstance(v, Tensor) and k != PIXELS[kind]]
    alike = [v for v in others if v is not pixels]  # timm's `x` is the same tensor
    if tower.packed or alike or not isinstance(pixels, Tensor) or pixels.ndim < 4:
        return []
    shots = pixels.flatten(0, -4)
    return list(shots.float().mean(1)) if len(shots) == frames else []


def flat_picture(pixels: Tensor) -> Tensor:
    """One frame `[..., C, H, W]` in the mean colour of the last one of `pixels`."""
    last = pixels.flatten(0, -4)[-1]
    flat = last.mean((-2, -1), keepdim=True).expand_as(last).contiguous()
    return flat[(None,) * (pixels.ndim - 3)]


def compared(
    x: Tensor,
    classes: Tensor,
    known: Tensor,
    flat: Tensor | None,
    move: Move,
    rule: Refresh,
    age: int,
) -> Reuse:
    """Compare patches `[n, D]` with those `known` of the base after a move, and choose by `rule`.

    `classes` are the rows that are no patches; they are computed with any patch, or not at all.
    """
    base = move.carried(known, flat)
    stayed = torch.ones(len(x), dtype=torch.bool, device=x.device)
    stayed[classes] = False
    content = stayed.nonzero()[:, 0]
    stayed[move.new] = False
    change = torch.zeros(len(x), device=x.device)
    change[stayed] = changes(x[stayed], base[stayed])
    rows = content[rule.most_changed(change[content])]
    rows = torch.cat([rows[change[rows] > STILL], move.new])
    same = move.sources is None and not bool(change.any())
    if len(rows):
        rows = torch.cat([rows, classes]).unique()
    return Reuse(move, rows, base, left_out(change, rows), age, same)


def by_frame(features: Tensor | Sequence[Tensor], frames: int) -> list[Tensor] | None:
    """Features of each frame `[k, D]`, of items that have equally many frames each.

    What follows the frames of an item, such as a separator, is left out; None where items and
    frames do not match.
    """
    items = list(features)
    if not items or frames % len(items) or any(item.ndim != 2 for item in items):
        return None
    each = frames // len(items)
    found: list[Tensor] = []
    for item in items:
        size = len(item) // each
        found.extend(item[: size * each].split(size) if size else [item] * each)
    return found
