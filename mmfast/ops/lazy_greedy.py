"""Greedy choice of rows that resemble no earlier pick, without comparing all with all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ACTIVE, _BLOCK = 512, 64
_FEW = 640  # rows up to which all cosines cost less than the search

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.int64]
Key = tuple[float, int]  # cost and index: the order in which rows are picked


@dataclass
class LazyGreedy:
    """Exact greedy picks of lowest cost, `share * likeness - own`, ties to the lowest index.

    The likeness of a row is its largest cosine with a pick. It only grows, and with it the cost,
    so one that has missed some picks is a lower bound. The rows of lowest cost (`_ACTIVE`) are
    kept up to date; of these the lowest (`_BLOCK`) are picked among themselves as long as no other
    row can come first. Rows near a pick are not looked at again.

    Attributes:
        rows: `[U, D]` unit rows on the host.
        count: Picks, at most U.
        own: `[U]` what a row is worth by itself; None where only likeness counts.
        share: Weight of likeness, 0 or more.
        step: Cosines are rounded to multiples of it; 0 leaves them as they are.
        stop: No row is picked whose cost is as high.
    """

    rows: Tensor
    count: int
    own: Floats | None = None
    share: float = 1.0
    step: float = 0.0
    stop: float = np.inf
    picks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        wide = self.rows.numpy().dtype
        self.chosen = self.rows.new_empty(self.count, self.rows.shape[-1])
        self.likeness = np.full(len(self.rows), -1.0, dtype=wide)
        self.seen = np.zeros(len(self.rows), dtype=np.int64)
        self.cost = self._cost(self.likeness, np.arange(len(self.rows)))

    def run(self, start: list[int]) -> Tensor:
        """Picks in order, those of `start` in front; fewer than `count` if `stop` is reached."""
        if len(self.rows) <= _FEW:
            return self._run_dense(start)
        self._take(start)
        self.cost[start] = np.inf
        if start:
            self._refresh(np.arange(len(self.rows)), self.rows)
        while len(self.picks) < self.count and self.cost.min() < self.stop:
            active, outside = lowest(self.cost, _ACTIVE)
            own = self.rows[torch.from_numpy(active)]
            self._refresh(active, own)
            while len(self.picks) < self.count and self._pick_block(active, own, outside):
                self._refresh(active, own)
        return torch.tensor(self.picks, dtype=torch.int64)

    def _run_dense(self, start: list[int]) -> Tensor:
        """The same picks where all cosines are at hand."""
        cosine, everything = self._cosine(self.rows, self.rows), np.arange(len(self.rows))
        picked = np.zeros(len(self.rows))  # +inf where it is
        cost = self.cost
        for number in range(self.count):
            pick = start[number] if number < len(start) else int(cost.argmin())
            if number >= len(start) and cost[pick] >= self.stop:
                break
            self.picks.append(pick)
            picked[pick] = np.inf
            np.maximum(self.likeness, cosine[pick], out=self.likeness)
            cost = self._cost(self.likeness, everything)
            cost += picked
        return torch.tensor(self.picks, dtype=torch.int64)

    def _cost(self, likeness: Floats, index: Integers) -> Floats:
        if self.own is None:
            return likeness.copy()
        cost: Floats = self.share * likeness - self.own[index]
        return cost

    def _cosine(self, a: Tensor, b: Tensor) -> Floats:
        cosine = (a @ b.T).numpy()
        if self.step:
            cosine /= self.step
            np.round(cosine, out=cosine)
            cosine *= self.step
        return cosine

    def _pick_block(self, active: Integers, own: Tensor, outside: Key) -> int:
        """Pick among the lowest of `active` (up to date, rows `own`); returns how many."""
        places, (cost, place) = lowest(self.cost[active], _BLOCK)
        limit = min(outside, (cost, int(active[place])), (self.stop, -1))
        part = own[torch.from_numpy(places)]
        cosine, index = self._cosine(part, part), active[places]
        local, likeness = self.cost[index], self.likeness[index]
        new: list[int] = []
        while len(self.picks) + len(new) < self.count:
            at = int(local.argmin())
            if (float(local[at]), int(index[at])) >= limit:
                break
            new.append(int(index[at]))
            np.maximum(likeness, cosine[at], out=likeness)
            local[at] = np.inf
            taken = np.isinf(local)
            local = self._cost(likeness, index)
            local[taken] = np.inf
        self.cost[new] = np.inf
        self._take(new)
        return len(new)

    def _take(self, new: list[int]) -> None:
        before = len(self.picks)
        self.picks.extend(new)
        self.chosen[before : len(self.picks)] = self.rows[torch.tensor(new, dtype=torch.int64)]

    def _refresh(self, index: Integers, own: Tensor) -> None:
        """Bring `index` (rows `own`) up to date with the picks each has missed."""
        stale, now = self.seen[index], len(self.picks)
        for since in np.unique(stale):
            if since == now:
                continue
            mask = stale == since
            part = own if mask.all() else own[torch.from_numpy(mask)]
            nearest = self._cosine(part, self.chosen[since:now]).max(-1)
            behind = index[mask]
            self.likeness[behind] = np.maximum(self.likeness[behind], nearest)
            cost = self._cost(self.likeness[behind], behind)
            self.cost[behind] = np.where(self.cost[behind] == np.inf, np.inf, cost)
        self.seen[index] = now


def lowest(cost: Floats, size: int) -> tuple[Integers, Key]:
    """The `size` lowest by (cost, index), in order of index, and the lowest of the others."""
    if size >= len(cost):
        return np.arange(len(cost)), (np.inf, 0)
    edge = np.partition(cost, size)[size]
    lower = np.flatnonzero(cost < edge)
    ties = np.flatnonzero(cost == edge)
    inside = size - len(lower)
    return np.sort(np.concatenate([lower, ties[:inside]])), (float(edge), int(ties[inside]))
