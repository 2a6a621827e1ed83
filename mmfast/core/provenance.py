"""What became of every token of an image or clip, after all stages together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction


@dataclass(frozen=True)
class View:
    """Where the tokens of one image or clip lie.

    Attributes:
        place: `[N, 3]` int: frame, row and column of each token.
        tile: `[N]` int of an image cut into tiles, 0 = overview, which has a raster of its own.
        source: Kind of media and number among those of its kind.
        start: How many reductions the trace held when this item came.
        loose: The model does not say how tiles lie, so `place` has them side by side.
    """

    place: Tensor
    tile: Tensor | None = None
    source: tuple[str, int] = ("image", 0)
    start: int = 0
    loose: bool = False

    def shaped(self, aspect: float) -> View:
        """Loose tiles in the rows and columns that come nearest to `aspect`, width by height."""
        if not self.loose or self.tile is None:
            return self
        count = int(self.tile.max())
        shapes = [(count // c, c) for c in range(1, count + 1) if count % c == 0]
        _, columns = min(shapes, key=lambda shape: abs(shape[1] / shape[0] - aspect))
        place = tile_places(self.tile, columns)
        return self if place is None else replace(self, place=place)

    def rasters(self) -> list[Tensor]:
        """Tokens of each frame, `[n]`; of an image cut into tiles the mosaic, then the overview."""
        if self.tile is not None and bool((self.tile > 0).any()):
            parts = [(self.tile > 0).nonzero()[:, 0], (self.tile == 0).nonzero()[:, 0]]
            return [part for part in parts if len(part)]
        time = self.place[:, 0]
        return [(time == t).nonzero()[:, 0] for t in time.unique()]


def tile_places(tile: Tensor, columns: int | None = None) -> Tensor | None:
    """`(0, y, x)` `[N, 3]` of whole square tiles in so many columns, all in a row if None.

    Args:
        tile: `[N]` tile of each token, 0 = overview, raster order inside a tile.
        columns: Tiles in a row of the mosaic.

    Returns:
        None where tiles are no squares of one size.
    """
    counts = tile.bincount()
    counts = counts[counts > 0]
    side = math.isqrt(int(counts[0]))
    if bool((counts != side * side).any()):
        return None
    number = (tile - 1).clamp_min(0)
    columns = columns or int(tile.max())
    order = tile.argsort(stable=True)
    inside = torch.empty_like(tile)
    inside[order] = torch.arange(len(tile)) % (side * side)
    y = number // columns * side + inside // side
    x = number % columns * side + inside % side
    return torch.stack([torch.zeros_like(y), y, x], dim=-1)


@dataclass(frozen=True)
class Fate:
    """What became of N tokens.

    Attributes:
        share: `[N]` 1 where a token is kept as it is, its part of the output where it was merged,
            0 where it was dropped.
        owner: `[N]` the output it ended in, -1 where it was dropped.
        keep: `[M]` the token each output stands for.
    """

    share: Tensor
    owner: Tensor
    keep: Tensor


def fate_of(n: int, reductions: Sequence[Reduction]) -> Fate:
    """The fate of `n` tokens under reductions one after the other.

    Where one source feeds several outputs (a mix), it counts with its largest part in one.

    Raises:
        MmfastError: A reduction does not start from what the one before left.
    """
    share, owner, keep = torch.ones(n), torch.arange(n), torch.arange(n)
    for reduction in reductions:
        if reduction.n != len(keep):
            raise MmfastError(
                f"a stage took {reduction.n} tokens where the one before left {len(keep)}: chunked "
                "prefill reduces in parts; leave out prefill_chunk_size to see what was kept"
            )
        slot, gone = owner.clamp_min(0), owner < 0
        part, where = _parts(reduction)
        share = (share * part[slot]).masked_fill(gone, 0)
        owner = where[slot].masked_fill(gone, -1)
        keep = keep[reduction.keep.cpu()]
    return Fate(share, owner, keep)


def _parts(reduction: Reduction) -> tuple[Tensor, Tensor]:
    """Of each source the part it has in one output, `[N]`, and that output, -1 if dropped."""
    if reduction.mix is None:
        return reduction.share().cpu().float(), reduction.owner.cpu()
    output, source, weight = (
        value.cpu() for value in (reduction.mix.output, reduction.mix.source, reduction.mix.weight)
    )
    weight = weight.abs().float()
    total = torch.zeros(reduction.m).index_add_(0, output, weight)
    part = weight / total[output].clamp_min(torch.finfo(torch.float32).tiny)
    best, where = torch.zeros(reduction.n), torch.full((reduction.n,), -1)
    for index in part.argsort().tolist():  # the largest part is written last
        best[source[index]], where[source[index]] = part[index], output[index]
    keep = reduction.keep.cpu()
    where[keep] = torch.arange(reduction.m)
    return best, where


@dataclass(frozen=True)
class Cells:
    """One frame as a raster, `[rows, columns]` each.

    Attributes:
        share: See `Fate`; 0 where there is no token.
        owner: Output of the whole item, -1 where dropped or no token.
        stands: Whether an output stands here.
    """

    share: Tensor
    owner: Tensor
    stands: Tensor


def cells_of(view: View, fate: Fate) -> list[Cells]:
    """Every frame of an item; see `View.rasters`."""
    stands = torch.zeros(len(fate.share), dtype=torch.bool)
    stands[fate.keep] = True
    found = []
    for tokens in view.rasters():
        row, column = view.place[tokens, 1], view.place[tokens, 2]
        shape = (int(row.max()) + 1, int(column.max()) + 1)
        share, owner = torch.zeros(shape), torch.full(shape, -1)
        standing = torch.zeros(shape, dtype=torch.bool)
        share[row, column], owner[row, column] = fate.share[tokens], fate.owner[tokens]
        standing[row, column] = stands[tokens]
        found.append(Cells(share, owner, standing))
    return found
