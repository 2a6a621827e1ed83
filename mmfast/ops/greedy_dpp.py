"""Greedy search for the most probable subset of a determinantal point process."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A row keeps this little of its squared length only by rounding: the picks before it span it.
_SPANNED = 2.0**-30
_STEP = 2.0**30  # gains are compared by whole numbers of log2(gain) * _STEP
_ACTIVE = 128  # rows kept up to date on a CPU: their residuals, 0.9 MB at width 896, stay in cache

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def greedy_dpp(rows: Tensor, quality: Tensor, count: int) -> Tensor:
    """Pick rows that are long and far from the span of the picks before.

    Every pick maximises the squared distance to the span of all before it, which is the factor
    by which the determinant of the kernel `rows @ rows.T` grows. Distances shrink with every pick
    and are updated, never recomputed: `count * N * D` at most. Once the picks span all rows, the
    others follow by quality.

    Args:
        rows: `[..., N, D]`, features times quality; computed in float64.
        quality: `[..., N]`, the order of what the picks span already.
        count: At most N.

    Returns:
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
    # The last column of `rank` took the picks that were none.
    first = rank[:, :n].gather(-1, by_quality).sort(dim=-1, stable=True).indices
    return by_quality.gather(-1, first)[:, :count].reshape(*lead, count)


def stepwise(rows: Tensor, count: int) -> Tensor:
    """Picks `[B, count]` of `rows` `[B, N, D]`, all rows updated after each: nothing is waited for.

    The number N stands for "none" once the picks span all rows.
    """
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
        for _ in range(2):  # the second round removes what rounding left in the first
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
    """The same picks without updating every row after each.

    Gains only shrink, so one that has missed some picks is an upper bound. The rows of largest
    bound are kept up to date and picked from as long as no other row can come first.
    """

    rows: Floats  # [N, D]
    count: int
    picks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gain = np.einsum("nd,nd->n", self.rows, self.rows)
        self.floor = self.gain * _SPANNED
        self.key = self._keys(np.arange(len(self.rows)))
        self.basis = np.empty((self.count, self.rows.shape[1]))

    def run(self) -> Tensor:
        """Picks `[count]` in order; N where the picks before span all rows."""
        while len(self.picks) < self.count and self.key.max() > -np.inf:
            active, outside = _highest(self.key, _ACTIVE)
            residual = self._refresh(active)
            while len(self.picks) < self.count and self._pick(active, residual, outside):
                pass
        none = [len(self.rows)] * (self.count - len(self.picks))
        return torch.tensor(self.picks + none, dtype=torch.int64)

    def _keys(self, index: Integers) -> Floats:
        """Gains in an order that rounding does not disturb; -inf where the picks span a row."""
        gain = self.gain[index]
        key: Floats = np.full(len(index), -np.inf)
        live = gain > self.floor[index]
        key[live] = np.round(np.log2(gain[live]) * _STEP)
        return key

    def _refresh(self, active: Integers) -> Floats:
        """What the picks so far leave of rows `active`, `[A, D]`; updates their gains."""
        own: Floats = self.rows[active]
        known = self.basis[: len(self.picks)]
        residual: Floats = own - (own @ known.T) @ known
        taken = self.gain[active] < 0
        self.gain[active] = np.where(taken, -1.0, np.einsum("nd,nd->n", residual, residual))
        self.key[active] = self._keys(active)
        return residual

    def _pick(self, active: Integers, residual: Floats, outside: tuple[float, int]) -> bool:
        """Pick the best of `active` unless one outside may come first; updates `residual`."""
        keys = self.key[active]
        at = int(keys.argmax())
        if keys[at] == -np.inf or (-keys[at], int(active[at])) > outside:
            return False
        unit, known = residual[at], self.basis[: len(self.picks)]
        if unit @ unit < self.floor[active[at]] * 2**20:  # a thousandth: its rounding grew as much
            unit = unit - (known @ unit) @ known
        unit = unit / np.sqrt(unit @ unit)
        self.basis[len(self.picks)] = unit
        self.picks.append(int(active[at]))
        along = residual @ unit
        residual -= along[:, None] * unit
        self.gain[active] -= along * along
        self.gain[active[at]] = -1.0
        self.key[active] = self._keys(active)
        return True


def _highest(key: Floats, size: int) -> tuple[Integers, tuple[float, int]]:
    """The `size` highest by (key, index), ascending, and the first of the others."""
    if size >= len(key):
        return np.arange(len(key)), (np.inf, 0)
    edge = np.partition(-key, size)[size]
    lower, ties = np.flatnonzero(-key < edge), np.flatnonzero(-key == edge)
    inside = size - len(lower)
    return np.sort(np.concatenate([lower, ties[:inside]])), (float(edge), int(ties[inside]))
