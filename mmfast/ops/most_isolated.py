"""The row whose nearest other row is farthest away."""

from __future__ import annotations

import torch
from torch import Tensor

_FEW, _WIDTH, _GROUP = 12, 64, 64
_SMALL = 256  # rows up to which the whole product costs less than the search


def most_isolated(rows: Tensor, twins: Tensor) -> int:
    """The unit row `[U, D]` with the smallest cosine to its nearest other row.

    Exact without the whole U x U product: a row is out as soon as it has met one other row that
    is nearer than the nearest of the best row so far. Rows first meet those that share their
    nearest landmark, so most are out early.

    Args:
        rows: Distinct unit rows.
        twins: `[U]` bool, rows that stand for several equal ones: their nearest is at cosine 1.

    Returns:
        Its index, the lowest one on ties; 0 if all rows have twins.
    """
    alive = (~twins).nonzero()[:, 0]
    if not len(alive) or len(rows) < 2:
        return 0
    nearest = torch.full_like(rows[:, 0], -torch.inf)
    order = _spread(len(rows)).to(rows.device)
    done, width = 0, _WIDTH
    while len(rows) > _SMALL and len(alive) > 2 * _FEW and done < len(order):
        columns = order[done : done + width]
        cosine = _product(rows, alive, columns)
        nearest[alive] = torch.maximum(nearest[alive], cosine.amax(-1))
        if not done:
            _meet_group(rows, alive[cosine.argmax(-1).argsort()], nearest)
        alive = _hopeful(rows, alive, nearest)
        done, width = done + width, width * 2
    return int(alive[_product(rows, alive, None).amax(-1).argmin()])


def _hopeful(rows: Tensor, alive: Tensor, nearest: Tensor) -> Tensor:
    """Those of `alive` that may still win, after the most promising few have met every row."""
    few = alive[nearest[alive].topk(min(_FEW, len(alive)), largest=False).indices]
    best = _product(rows, few, None).amax(-1).min()
    # The margin keeps rows that another product would round to the other side.
    return alive[nearest[alive] <= best + 1e-6]


def _meet_group(rows: Tensor, sorted_rows: Tensor, nearest: Tensor) -> None:
    """Let rows that are sorted by landmark meet in groups, and raise `nearest` in place."""
    whole = len(sorted_rows) // _GROUP * _GROUP
    groups = sorted_rows[:whole].reshape(-1, _GROUP)
    members = rows[groups]  # [groups, _GROUP, D]
    cosine = members @ members.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    nearest[groups] = torch.maximum(nearest[groups], cosine.amax(-1))


def _product(rows: Tensor, left: Tensor, columns: Tensor | None) -> Tensor:
    """Cosines of rows `left` with rows `columns` (None: all), -inf of a row with itself."""
    ours = rows if len(left) == len(rows) else rows[left]
    if columns is None:
        cosine = ours @ rows.T
        cosine[torch.arange(len(left), device=left.device), left] = -torch.inf
        return cosine
    return (ours @ rows[columns].T).masked_fill_(left[:, None] == columns, -torch.inf)


def _spread(n: int) -> Tensor:
    """All indices below `n` in an order whose every prefix covers the whole sequence."""
    return (torch.arange(n, dtype=torch.float64) * 0.6180339887498949 % 1.0).argsort(stable=True)
