"""Greedy subset searches that update only the rows that can be picked next.

The picks are those of a search that updates every row after each pick.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A row whose squared length shrank below this share is spanned by the picks before it.
_SPANNED = 2.0**-30
_STEP = 2.0**30  # gains are compared by whole numbers of log2(gain) * _STEP
_ACTIVE = 256  # rows brought up to date at once on a CPU: their residuals stay in cache
_GRAIN = 64  # rows that missed about as many picks are brought up to date together
_BEST = 48  # rows whose inner products are computed to pick from
_WORN = 2.0**-10  # gains that shrank by more since they were computed have lost digits

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def greedy_dpp(rows: Tensor, quality: Tensor, count: int) -> Tensor:
    """Pick rows that are long and far from the span of the picks before them.

    Every pick maximises the squared distance to the span of all before it, which is the factor by
    which the determinant of the kernel `rows @ rows.T` grows. Distances shrink with every pick and
    are updated, never recomputed: `count * N * D` at most. Once the picks span all rows, the others
    follow by quality. `rows` `[..., N, D]` are features times quality, computed in float64. Returns
    `[..., count]` int64 in the order of picking, no index twice; ties to the lowest index.
    """
    lead, (n, width) = rows.shape[:-2], rows.shape[-2:]
    flat, most = rows.double().reshape(-1, n, width), min(count, n, width)
    if rows.device.type == "cpu":
        picks = torch.stack([_Search(item.numpy(), most).run() for item in flat])
    else:
        picks = stepwise(flat, most)  # [B, most]
    rank = torch.full((len(flat), n + 1), count, device=rows.device)
    rank.scatter_(1, picks, torch.arange(most, device=rows.device).expand_as(picks))
    by_quality = quality.reshape(-1, n).sort(dim=-1, descending=True, stable=True).indices
    # The last column of `rank` took the places without a pick.
    first = rank[:, :n].gather(-1, by_quality).sort(dim=-1, stable=True).indices
    return by_quality.gather(-1, first)[:, :count].reshape(*lead, count)


def stepwise(rows: Tensor, count: int) -> Tensor:
    """Picks `[B, count]` of `rows` `[B, N, D]` without a wait; N once the picks span all rows."""
    items, n, width = rows.shape
    batch = torch.arange(items, device=rows.device)
    gain = rows.square().sum(-1)  # [B, N]
    floor = gain * _SPANNED
    basis = rows.new_zeros(items, count, width)
    picks = torch.full((items, count), n, device=rows.device)
    for step in range(count):
        key = torch.where(gain > floor, (gain.clamp_min(0).log2() * _STEP).round(), -torch.inf)
        best, pick = key.amax(-1), (key >= key.amax(-1, keepdim=True)).byte().argmax(-1)
        there = best > -torch.inf
        picks[:, step] = torch.where(there, pick, n)
        rest = rows[batch, pick]  # [B, D]
        for _ in range(2):  # the second round removes the rounding error of the first
            along = basis[:, :step] @ rest[..., None]
            rest = rest - (basis[:, :step] * along).sum(1)
        length = rest.norm(dim=-1, keepdim=True)
        unit = torch.where(there[:, None], rest / length.clamp_min(1e-300), 0)
        basis[:, step] = unit
        gain = gain - (rows @ unit[..., None])[..., 0].square()
        gain[batch, pick] = -1.0
    return picks


@dataclass
class _Search:
    """Search for the same picks on the host, without updating every row after each.

    Gains only shrink, so one that has missed some picks is an upper bound. The rows of largest
    bound are brought up to date and picked from as long as no other row can come first.
    """

    rows: Floats  # [N, D]
    count: int
    picks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rest = self.rows.copy()  # each row less its part in the span of the first `seen` picks
        self.gain = np.einsum("nd,nd->n", self.rows, self.rows)
        self.floor = self.gain * _SPANNED
        self.key = _keys(self.gain, self.floor)
        self.seen = np.zeros(len(self.rows), dtype=np.int64)
        self.basis = np.empty((self.count, self.rows.shape[1]))

    def run(self) -> Tensor:
        """Return picks `[count]` in order; N where the picks before span all rows."""
        while len(self.picks) < self.count and self.key.max() > -np.inf:
            active, outside = lowest(-self.key, _ACTIVE)
            residual = self._refresh(active)
            self._pick(active, residual, outside)
        none = [len(self.rows)] * (self.count - len(self.picks))
        return torch.tensor(self.picks + none, dtype=torch.int64)

    def _refresh(self, active: Integers) -> Floats:
        now = len(self.picks)
        # Few products of many rows: to take out a direction again changes nothing.
        stale = np.where(self.seen[active] < now, self.seen[active] // _GRAIN * _GRAIN, now)
        residual: Floats = self.rest[active]
        for since in np.unique(stale[stale < now]):
            late = stale == since
            part, missed = residual[late], self.basis[since:now]
            residual[late] = part - _product(_product(part, missed.T), missed)
        self.rest[active], self.seen[active] = residual, now
        fresh = np.einsum("nd,nd->n", residual, residual)
        self.gain[active] = np.where(self.gain[active] < 0, -1.0, fresh)
        self.key[active] = _keys(self.gain[active], self.floor[active])
        return residual

    def _pick(self, active: Integers, residual: Floats, outside: tuple[float, int]) -> None:
        places, (key_, place) = lowest(-self.key[active], _BEST)
        outside = min(outside, (key_, int(active[place])))
        active, residual = active[places], residual[places]
        inner = _product(residual, residual.T)  # [A, A]
        gain, floor, key = self.gain[active], self.floor[active], self.key[active]
        start, new = gain.copy(), list[int]()
        while len(self.picks) + len(new) < self.count:
            at = int(key.argmax())
            if key[at] == -np.inf or (-key[at], int(active[at])) > outside:
                break
            if gain[at] < start[at] * _WORN:  # differences of inner products have lost digits
                break
            new.append(at)
            along = inner[at] / np.sqrt(gain[at])
            inner -= along[:, None] * along
            gain = np.where(gain < 0, -1.0, gain - along * along)
            gain[at] = -1.0
            key = _keys(gain, floor)
        self.gain[active], self.key[active] = gain, key
        self._extend(active[new], residual[new])

    def _extend(self, chosen: Integers, residual: Floats) -> None:
        now, more = len(self.picks), len(chosen)
        if not more:
            return
        known = self.basis[:now]
        length = np.einsum("nd,nd->n", residual, residual)
        if (length < self.floor[chosen] * 2**20).any():  # a thousandth: its rounding grew as much
            residual = residual - _product(_product(residual, known.T), known)
        self.basis[now : now + more] = torch.linalg.qr(torch.from_numpy(residual).T)[0].T.numpy()
        self.picks.extend(chosen.tolist())


def _product(a: Floats, b: Floats) -> Floats:
    # By torch: it keeps to the number of threads that its user set.
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()


def _keys(gain: Floats, floor: Floats) -> Floats:
    """Gains in an order that rounding does not disturb; -inf where the picks span a row."""
    key: Floats = np.full(len(gain), -np.inf)
    live = gain > floor
    key[live] = np.round(np.log2(gain[live]) * _STEP)
    return key


_ACTIVE_ROWS, _BLOCK = 512, 64
_FEW = 640  # rows up to which all cosines cost less than the search

AnyFloats = NDArray[np.floating[Any]]

Key = tuple[float, int]  # cost and index: the order in which rows are picked


@dataclass
class LazyGreedy:
    """Exact greedy picks of lowest cost, `share * likeness - own`, ties to the lowest index.

    The likeness of a row is its largest cosine with a pick. It only grows, and with it the cost, so
    one that has missed some picks is a lower bound. The rows of lowest cost (`_ACTIVE`) are kept up
    to date, and the lowest of these (`_BLOCK`) picked as long as no other can come first.
    """

    rows: Tensor  # `[U, D]` unit rows on the host
    count: int  # picks, at most U
    own: AnyFloats | None = None  # `[U]` worth of a row by itself; None where only likeness counts
    share: float = 1.0  # weight of likeness, 0 or more
    step: float = 0.0  # cosines are rounded to multiples of it; 0 leaves them as they are
    stop: float = np.inf  # no row is picked whose cost is as high
    picks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        wide = self.rows.numpy().dtype
        self.chosen = self.rows.new_empty(self.count, self.rows.shape[-1])
        self.likeness = np.full(len(self.rows), -1.0, dtype=wide)
        self.seen = np.zeros(len(self.rows), dtype=np.int64)
        self.cost = self._cost(self.likeness, np.arange(len(self.rows)))

    def run(self, start: list[int]) -> Tensor:
        """Return picks in order, `start` first; fewer than `count` if `stop` is reached."""
        if len(self.rows) <= _FEW:
            return self._run_dense(start)
        self._take(start)
        self.cost[start] = np.inf
        if start:
            self._refresh(np.arange(len(self.rows)), self.rows)
        while len(self.picks) < self.count and self.cost.min() < self.stop:
            active, outside = lowest(self.cost, _ACTIVE_ROWS)
            own = self.rows[torch.from_numpy(active)]
            self._refresh(active, own)
            while len(self.picks) < self.count and self._pick_block(active, own, outside):
                self._refresh(active, own)
        return torch.tensor(self.picks, dtype=torch.int64)

    def _run_dense(self, start: list[int]) -> Tensor:
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

    def _cost(self, likeness: AnyFloats, index: Integers) -> AnyFloats:
        if self.own is None:
            return likeness.copy()
        return self.share * likeness - self.own[index]

    def _cosine(self, a: Tensor, b: Tensor) -> AnyFloats:
        cosine = (a @ b.T).numpy()
        if self.step:
            cosine /= self.step
            np.round(cosine, out=cosine)
            cosine *= self.step
        return cosine

    def _pick_block(self, active: Integers, own: Tensor, outside: Key) -> int:
        """Pick among the lowest of `active` (up to date, rows `own`); return their number."""
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
        stale, now = self.seen[index], len(self.picks)
        for since in np.unique(stale):
            if since == now:
                continue
            mask = stale == since
            part = own if mask.all() else own[torch.from_numpy(mask)]
            nearest = self._cosine(part, self.chosen[since:now]).max(-1)
            late = index[mask]
            self.likeness[late] = np.maximum(self.likeness[late], nearest)
            cost = self._cost(self.likeness[late], late)
            self.cost[late] = np.where(self.cost[late] == np.inf, np.inf, cost)
        self.seen[index] = now


def lowest(cost: AnyFloats, size: int) -> tuple[Integers, Key]:
    """The `size` lowest by (cost, index), in order of index, and the lowest of the others."""
    if size >= len(cost):
        return np.arange(len(cost)), (np.inf, 0)
    edge = np.partition(cost, size)[size]
    lower = np.flatnonzero(cost < edge)
    ties = np.flatnonzero(cost == edge)
    inside = size - len(lower)
    return np.sort(np.concatenate([lower, ties[:inside]])), (float(edge), int(ties[inside]))
