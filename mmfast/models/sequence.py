"""Which token of a batch belongs to which image or video, before and after reductions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.reduction import Reduction
from mmfast.models.records import Record


@dataclass
class Item:
    """The tokens of one image or video in the sequence of one batch row.

    Attributes:
        row: Batch row.
        number: Counts the images and videos of the batch in reading order.
        where: Current places in the row of the tokens a method may reduce, `[n]` ascending.
        planes: Places of the same tokens, unreduced, among all visual tokens of the batch.
        grid: `(t, h, w)` while nothing was removed and the tokens are a full raster.
        signals: Signals of the vision tower.
        chain: Reductions applied so far.
        record: Where the features came from, and which item they are there.
        index: Item number in `record`.
        part: Under chunked prefill: this chunk holds tokens `part[0]:part[1]` of `part[2]`.
        source: Under chunked prefill: the plan for the whole item, and the outputs that are here.
        entered: Tokens of the whole item that entered each schedule (core/schedule.py).
    """

    row: int
    number: int
    where: Tensor
    planes: Tensor
    grid: tuple[int, int, int] | None
    signals: dict[str, Tensor] = field(default_factory=dict)
    chain: list[Reduction] = field(default_factory=list)
    record: Record | None = None
    index: int = 0
    part: tuple[int, int, int] | None = None
    source: tuple[Any, Tensor] | None = None
    entered: dict[int, int] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Tokens left."""
        return len(self.where)


@dataclass
class Sequences:
    """The rows of a batch: what no method touches, and the items.

    Attributes:
        length: Tokens per row, padding included.
        fixed: Per row the places of text and separators, `[F]` ascending.
        text: Per row the places of text, `[T]` ascending.
        items: All items.
        ok: `[B, length]` False at padding; None where there is none.
        index: `[B, length]` the original place of each token; None while nothing was removed.
    """

    length: int
    fixed: list[Tensor]
    text: list[Tensor]
    items: list[Item]
    ok: Tensor | None = None
    index: Tensor | None = None

    def compact(self, keep: Seq[Tensor]) -> Tensor:
        """Keep `keep[i]` `[m]` of item i; rows of unequal length get left padding.

        Padding there was before is dropped too.

        Returns:
            `[B, new length]` the previous place of every token.
        """
        kept = [item.where[k] for item, k in zip(self.items, keep, strict=True)]
        rows = []
        for b, fixed in enumerate(self.fixed):
            mine = [k for item, k in zip(self.items, kept, strict=True) if item.row == b]
            rows.append(torch.cat([fixed, *mine]).sort().values)
        # A chunk of which nothing is left becomes one padding token: layers refuse empty input.
        self.length = max(1, *(len(row) for row in rows))
        gaps = [self.length - len(row) for row in rows]
        for item, places in zip(self.items, kept, strict=True):
            item.grid = item.grid if len(places) == item.n else None
            item.where = torch.searchsorted(rows[item.row], places) + gaps[item.row]
        for group in (self.fixed, self.text):
            group[:] = [
                torch.searchsorted(row, places) + gap
                for row, places, gap in zip(rows, group, gaps, strict=True)
            ]
        self._pad(gaps, rows[0].device)
        order = torch.stack([F.pad(row, (gap, 0)) for row, gap in zip(rows, gaps, strict=True)])
        self.index = order if self.index is None else self.index.gather(1, order)
        return order

    def to(self, device: torch.device) -> None:
        """Follow a model whose layers lie on several devices."""
        for item in self.items:
            item.where, item.planes = item.where.to(device), item.planes.to(device)
        for group in (self.fixed, self.text):
            group[:] = [places.to(device) for places in group]
        self.ok = None if self.ok is None else self.ok.to(device)
        self.index = None if self.index is None else self.index.to(device)

    def _pad(self, gaps: list[int], device: torch.device) -> None:
        self.ok = None
        if any(gaps):
            start = torch.tensor(gaps, device=device)[:, None]
            self.ok = torch.arange(self.length, device=device) >= start


def take(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` `[B, n]` of `x` `[B or 1, L, C]`, as `[B, n, C]`, without an expanded gather."""
    index = index.to(x.device)
    if len(index) == 1:
        return x[0].index_select(0, index[0])[None]
    batch, length, width = len(index), *x.shape[1:]
    base = torch.arange(batch, device=index.device)[:, None] * (length if len(x) > 1 else 0)
    flat = x.reshape(-1, width).index_select(0, (index + base).flatten())
    return flat.view(batch, -1, width)
