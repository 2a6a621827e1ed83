"""Greedy max-min selection: every pick is the row farthest from all picks before it."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.lazy_greedy import LazyGreedy
from mmfast.ops.most_isolated import most_isolated
from mmfast.ops.row_groups import first_of_equal
from mmfast.ops.unit import unit_rows

# Cosines this close to 1 differ by rounding only: such rows count as equal.
_SAME = 1.0 - 2.0**-20


def max_min(x: Tensor, count: int) -> Tensor:
    """Pick `count` rows by greatest cosine distance to the rows already picked.

    The first pick is the row whose nearest other row is farthest away. Ties go to the lowest
    index; a row is picked once, and rows equal to a pick come last, lowest index first. A zero row
    is at distance 1 from all but other zero rows, which equal it.

    Args:
        x: `[..., N, D]`, each item on its own.
        count: Number of picks, at most N.

    Returns:
        `[..., count]` int64 in the order of picking.
    """
    items = x.reshape(-1, *x.shape[-2:])
    if x.is_cuda:
        from mmfast.ops.max_min_device import max_min_device

        picks = max_min_device(items, count)
    else:
        picks = torch.stack([_on_host(item, count) for item in items])
    return picks.reshape(*x.shape[:-2], count)


def _on_host(x: Tensor, count: int) -> Tensor:
    """Picks `[count]` of one item `[N, D]`."""
    n = x.shape[0]
    rows = unit_rows(x)
    first = first_of_equal(rows)
    distinct = (first == torch.arange(n, device=x.device)).nonzero()[:, 0]
    twins = torch.bincount(first, minlength=n)[distinct] > 1
    if len(distinct) < n:
        rows = rows[distinct]
    start = most_isolated(rows, twins)
    search = LazyGreedy(rows.cpu(), min(count, len(rows)), stop=_SAME)
    picks = distinct[search.run([start]).to(x.device)]
    if len(picks) < count:
        free = torch.ones(n, dtype=torch.bool, device=x.device)
        free[picks] = False
        picks = torch.cat([picks, free.nonzero()[: count - len(picks), 0]])
    return picks
