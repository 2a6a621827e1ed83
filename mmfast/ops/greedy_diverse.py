"""Greedy choice of tokens that score high and do not resemble each other."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.cosine_table import cosine_table
from mmfast.ops.lazy_greedy import LazyGreedy
from mmfast.ops.snap import ROUNDING
from mmfast.ops.unit import unit_rows


def greedy_diverse(
    score: Tensor, x: Tensor, count: int, balance: float, start: Tensor | None = None
) -> Tensor:
    """Pick `count` rows, each with the best score less its likeness to the picks before it.

    A row's worth is `balance * score - (1 - balance) * likeness`, the likeness being its largest
    cosine with a pick. The first pick has the best score; ties go to the lowest index.

    Args:
        score: `[N]`, of the order of a cosine: see `rescale`.
        x: `[N, D]`.
        count: Number of picks, at most N.
        balance: From 0, unlike tokens only, to 1, high scores only.
        start: Rows that are picked beforehand, at most `count`.

    Returns:
        `[count]` int64 in the order of picking, `start` in front.
    """
    own = balance * score.double()
    first = [] if start is None else start.tolist()
    if x.is_cuda:
        return _stepwise(own, x, count, 1 - balance, first)
    rows = unit_rows(x.double())
    return LazyGreedy(rows, count, own.numpy(), 1 - balance, ROUNDING).run(first)


def _stepwise(own: Tensor, x: Tensor, count: int, share: float, start: list[int]) -> Tensor:
    """The same picks from the table of all cosines, without waiting for the device."""
    table = cosine_table(x, x)
    likeness = torch.full_like(own, -1.0)
    picks = torch.empty(count, dtype=torch.int64, device=x.device)
    free = torch.zeros_like(own)  # -inf once picked
    for step in range(count):
        if step < len(start):
            picks[step] = start[step]
        else:
            picks[step : step + 1] = (own - share * likeness + free).argmax(keepdim=True)
        pick = picks[step : step + 1]
        likeness = torch.maximum(likeness, table.index_select(0, pick)[0])
        free.index_fill_(0, pick, -torch.inf)
    return picks
