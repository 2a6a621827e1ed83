"""Greedy max-min selection: every pick is the row farthest from all picks before it."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.ops.row_groups import first_of_equal
from mmfast.ops.unit import unit_rows

# Cosines this close to 1 differ by rounding only: such rows count as equal.
_SAME = 1.0 - 2.0**-20
_BLOCK = 128


def max_min(x: Tensor, count: int) -> Tensor:
    """Pick `count` rows by greatest cosine distance to the rows already picked.

    The first pick is the row whose nearest other row is farthest away. Ties go to the lowest
    index; a row is picked once, and rows equal to a pick come last, lowest index first.

    Args:
        x: `[N, D]`.
        count: Number of picks, at most N.

    Returns:
        `[count]` int64 in the order of picking.
    """
    n = x.shape[0]
    rows = unit_rows(x)
    first = first_of_equal(rows)
    distinct = (first == torch.arange(n, device=x.device)).nonzero()[:, 0]
    twins = torch.bincount(first, minlength=n)[distinct] > 1
    if len(distinct) < n:
        rows = rows[distinct]
    picks = distinct[_select(rows, twins, count)]
    if len(picks) < count:
        free = torch.ones(n, dtype=torch.bool, device=x.device)
        free[picks] = False
        picks = torch.cat([picks, free.nonzero()[: count - len(picks), 0]])
    return picks


def _select(rows: Tensor, twins: Tensor, count: int) -> Tensor:
    """Picks among distinct unit rows `[U, D]`; stops early when all others equal a pick."""
    start = most_isolated(rows, twins)
    return _lazy(rows, start, min(count, len(rows)))


def most_isolated(rows: Tensor, twins: Tensor) -> int:
    """The unit row `[U, D]` with the smallest cosine to its nearest other row.

    Exact without the whole U x U product: a row is out as soon as it has met one other row that
    is nearer than the nearest of the best row so far. `twins` `[U]` marks rows that have an equal.
    """
    alive = (~twins).nonzero()[:, 0]
    if not len(alive) or len(rows) < 2:
        return 0
    nearest = torch.full((len(rows),), -torch.inf, dtype=rows.dtype, device=rows.device)
    best = torch.inf
    order = _spread(len(rows)).to(rows.device)
    done = 0
    width = 64
    while done < len(order) and len(alive) > 32:
        columns = order[done : done + width]
        nearest[alive] = torch.maximum(nearest[alive], _nearest(rows, alive, columns))
        done, width = done + width, width * 2
        few = alive[nearest[alive].topk(min(16, len(alive)), largest=False).indices]
        best = min(best, float(_nearest(rows, few, None).min()))
        alive = alive[nearest[alive] <= best + 1e-6]  # margin: another product rounds otherwise
    exact = _nearest(rows, alive, None)
    return int(alive[exact.argmin()])


def _nearest(rows: Tensor, left: Tensor, columns: Tensor | None) -> Tensor:
    """Largest cosine of each row `left` with the rows `columns` (None: all), itself left out."""
    right = rows if columns is None else rows[columns]
    cosine = rows[left] @ right.T
    if columns is None:
        cosine[torch.arange(len(left), device=left.device), left] = -torch.inf
    else:
        cosine.masked_fill_(left[:, None] == columns, -torch.inf)
    return cosine.max(-1).values


def _spread(n: int) -> Tensor:
    """All indices below `n`, the first ones far apart: any prefix covers the whole sequence."""
    golden = torch.arange(n, dtype=torch.float64) * 0.6180339887498949
    return (golden % 1.0).argsort(stable=True).argsort(stable=True)


def _lazy(rows: Tensor, start: int, count: int) -> Tensor:
    """Exact greedy picks in blocks.

    Bounds only grow, so the stale bound of a row is a lower bound. The rows with the smallest
    bounds are brought up to date and picked among themselves as long as the best of them stays
    below every bound outside; rows near a pick are never looked at again.
    """
    total = len(rows)
    bound = np.full(total, -np.inf, dtype=np.float64)  # largest cosine with picks[:seen]
    seen = np.zeros(total, dtype=np.int64)
    picks = [start]
    bound[start] = np.inf
    chosen = rows.new_empty(count, rows.shape[-1])
    chosen[0] = rows[start]
    while len(picks) < count:
        block, outside = _lowest(bound, min(_BLOCK, total))
        index = torch.from_numpy(block)
        own = rows[index]
        _refresh(own, chosen, bound, seen, block, len(picks))
        local = bound[block]
        gram = (own @ own.T).double().numpy()
        if local.min() >= _SAME and outside >= _SAME:
            break
        before = len(picks)
        while len(picks) < count:
            at = int(local.argmin())
            if not local[at] < min(outside, _SAME):
                break
            picks.append(int(block[at]))
            np.maximum(local, gram[at], out=local)
            local[at] = np.inf
        new = len(picks) - before
        bound[block], seen[block] = local, len(picks)
        if new:
            chosen[before : before + new] = rows[torch.tensor(picks[before:])]
    return torch.tensor(picks)


def _lowest(bound: NDArray[np.float64], size: int) -> tuple[NDArray[np.int64], float]:
    """The `size` rows of smallest bound, ascending, and the smallest bound of the others."""
    if size == len(bound):
        return np.arange(size), np.inf
    order = np.argpartition(bound, size)
    return np.sort(order[:size]), float(bound[order[size]])


def _refresh(
    own: Tensor,
    chosen: Tensor,
    bound: NDArray[np.float64],
    seen: NDArray[np.int64],
    block: NDArray[np.int64],
    now: int,
) -> None:
    """Bring the bounds of `block` up to date with the picks each of its rows has missed."""
    stale = seen[block]
    for since in np.unique(stale):
        if since == now:
            continue
        mask = stale == since
        cosine = own[torch.from_numpy(mask)] @ chosen[since:now].T
        nearest = cosine.max(-1).values.double().numpy()
        bound[block[mask]] = np.maximum(bound[block[mask]], nearest)
