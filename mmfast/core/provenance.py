"""What became of every token of an image or clip, after all stages together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    place: Tensor
    tile: Tensor | None = None
    source: tuple[str, int] = ("image", 0)
    start: int = 0

    def rasters(self) -> list[Tensor]:
        """Tokens of each frame, `[n]`; of an image cut into tiles the mosaic, then the overview."""
        if self.tile is not None and bool((self.tile > 0).any()):
            parts = [(self.tile > 0).nonzero()[:, 0], (self.tile == 0).nonzero()[:, 0]]
            return [part for part in parts if len(part)]
        time = self.place[:, 0]
        return [(time == t).nonzero()[:, 0] for t in time.unique()]


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
