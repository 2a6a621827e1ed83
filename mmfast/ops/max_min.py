"""Greedy max-min selection: every pick is the row farthest from all picks before it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.ops.most_isolated import most_isolated
from mmfast.ops.row_groups import first_of_equal
from mmfast.ops.unit import unit_rows

# Cosines this close to 1 differ by rounding only: such rows count as equal.
_SAME = 1.0 - 2.0**-20
_ACTIVE, _BLOCK = 512, 64

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]
Key = tuple[float, int]  # bound and index: the order in which rows are picked


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
    picks = distinct[_Search(rows.cpu(), min(count, len(rows))).run(start).to(x.device)]
    if len(picks) < count:
        free = torch.ones(n, dtype=torch.bool, device=x.device)
        free[picks] = False
        picks = torch.cat([picks, free.nonzero()[: count - len(picks), 0]])
    return picks


@dataclass
class _Search:
    """Exact greedy picks without comparing every row with every pick.

    The bound of a row is its largest cosine with the first `seen` picks. Bounds only grow, so a
    stale one is a lower bound. The rows of smallest bound (`_ACTIVE`) are kept up to date; of
    these the smallest (`_BLOCK`) are picked among themselves as long as no other row can come
    first. Rows near a pick are not looked at again.
    """

    rows: Tensor  # [U, D], distinct unit rows
    count: int
    picks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chosen = self.rows.new_empty(self.count, self.rows.shape[-1])
        self.bound = np.full(len(self.rows), -np.inf, dtype=self.rows.numpy().dtype)
        self.seen = np.zeros(len(self.rows), dtype=np.int64)

    def run(self, start: int) -> Tensor:
        """Picks in order, from row `start`; fewer than `count` if all others equal a pick."""
        self._take([start])
        self.bound[start] = np.inf
        self._refresh(np.arange(len(self.rows)), self.rows)
        while len(self.picks) < self.count and self.bound.min() < _SAME:
            active, outside = _lowest(self.bound, _ACTIVE)
            own = self.rows[torch.from_numpy(active)]
            self._refresh(active, own)
            while len(self.picks) < self.count and self._pick_block(active, own, outside):
                self._refresh(active, own)
        return torch.tensor(self.picks)

    def _pick_block(self, active: Integers, own: Tensor, outside: Key) -> int:
        """Pick among the lowest of `active` (fresh bounds, rows `own`); returns how many."""
        places, (bound, place) = _lowest(self.bound[active], _BLOCK)
        limit = min(outside, (bound, int(active[place])), (_SAME, -1))
        part = own[torch.from_numpy(places)]
        gram = (part @ part.T).numpy()
        index = active[places]
        local = self.bound[index]
        new: list[int] = []
        while len(self.picks) + len(new) < self.count:
            at = int(local.argmin())
            if (float(local[at]), int(index[at])) >= limit:
                break
            new.append(int(index[at]))
            np.maximum(local, gram[at], out=local)
            local[at] = np.inf
        self.bound[new] = np.inf
        self._take(new)
        return len(new)

    def _take(self, new: list[int]) -> None:
        before = len(self.picks)
        self.picks.extend(new)
        self.chosen[before : len(self.picks)] = self.rows[torch.tensor(new, dtype=torch.int64)]

    def _refresh(self, index: Integers, own: Tensor) -> None:
        """Bring the bounds of `index` (rows `own`) up to date with the picks each has missed."""
        stale = self.seen[index]
        now = len(self.picks)
        for since in np.unique(stale):
            if since == now:
                continue
            mask = stale == since
            part = own if mask.all() else own[torch.from_numpy(mask)]
            nearest = (part @ self.chosen[since:now].T).amax(-1).numpy()
            behind = index[mask]
            self.bound[behind] = np.maximum(self.bound[behind], nearest)
        self.seen[index] = now


def _lowest(bound: Floats, size: int) -> tuple[Integers, Key]:
    """The `size` lowest by (value, index), in order of index, and the lowest of the others."""
    if size >= len(bound):
        return np.arange(len(bound)), (np.inf, 0)
    edge = np.partition(bound, size)[size]
    lower = np.flatnonzero(bound < edge)
    ties = np.flatnonzero(bound == edge)
    inside = size - len(lower)
    return np.sort(np.concatenate([lower, ties[:inside]])), (float(edge), int(ties[inside]))
