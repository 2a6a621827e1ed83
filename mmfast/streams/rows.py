"""Arrays that grow at the end and lose rows anywhere, at a constant cost per row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_LEAST = 64


class Rows:
    """Parallel arrays of rows, each of which belongs to a block; blocks arrive in order.

    Rows are appended into spare capacity. Lost rows are skipped at the front and marked
    elsewhere; arrays are made anew, twice as large as what is alive, only when they are full or
    are read with marked rows in them. So memory follows what is alive, and nothing is moved more
    than a few times.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Tensor] = {}
        # Ascending. Arrays of numpy: their small steps cost a tenth of a tensor's.
        self._owner = np.empty(0, dtype=np.int64)
        self._alive = np.empty(0, dtype=np.bool_)
        self._head = self._tail = self._dead = 0

    def __len__(self) -> int:
        return self._tail - self._head - self._dead

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        columns = sum(column.nbytes for column in self._columns.values())
        return self._owner.nbytes + self._alive.nbytes + columns

    def append(self, number: int, **columns: Tensor) -> None:
        """Add rows `[k, ...]` of block `number`, which is above all before."""
        count = len(next(iter(columns.values())))
        if not self._columns:
            self._columns = {
                name: new.new_empty(0, *new.shape[1:]) for name, new in columns.items()
            }
        if self._tail + count > len(self._owner):
            self._resize(2 * (len(self) + count))
        end = self._tail + count
        for name, new in columns.items():
            self._columns[name][self._tail : end] = new
        self._owner[self._tail : end] = number
        self._alive[self._tail : end] = True
        self._tail = end

    def drop(self, number: int) -> None:
        """Lose the rows of a block, if it has any."""
        owner = self._owner[self._head : self._tail]
        start = self._head + int(owner.searchsorted(number))
        end = self._head + int(owner.searchsorted(number, side="right"))
        if start == end or not self._alive[start]:
            return
        if start == self._head:
            self._head = end
        else:
            self._alive[start:end] = False
            self._dead += end - start

    def spans(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """First row of each block and the one behind its last, as `view` has them."""
        owner = torch.from_numpy(self._owner[self._head : self._tail])
        return torch.searchsorted(owner, numbers), torch.searchsorted(owner, numbers, right=True)

    def view(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The block of each row `[C]`, on the CPU, and the columns; not to be written to."""
        if self._dead:
            self._resize(2 * len(self))
        live = slice(self._head, self._tail)
        owner = torch.from_numpy(self._owner[live])
        return owner, {name: column[live] for name, column in self._columns.items()}

    def _resize(self, capacity: int) -> None:
        rows = self._head + self._alive[self._head : self._tail].nonzero()[0]
        capacity, live = max(_LEAST, capacity), len(rows)
        owner, self._alive = np.empty(capacity, np.int64), np.zeros(capacity, np.bool_)
        owner[:live], self._alive[:live] = self._owner[rows], True
        self._owner = owner
        taken = torch.from_numpy(rows)
        self._columns = {name: _moved(c, taken, capacity) for name, c in self._columns.items()}
        self._head, self._tail, self._dead = 0, live, 0

    def snapshot(self) -> dict[str, Any]:
        """Plain data of what is alive."""
        owner, columns = self.view()
        return {"owner": owner, "columns": columns}

    @classmethod
    def restore(cls, tree: dict[str, Any], device: torch.device) -> Rows:
        """The inverse of `snapshot`."""
        rows = cls()
        rows._columns = {name: column.to(device) for name, column in tree["columns"].items()}
        rows._owner = tree["owner"].numpy().copy()
        rows._alive = np.ones(len(rows._owner), np.bool_)
        rows._tail = len(rows._owner)
        return rows


def _moved(column: Tensor, rows: Tensor, capacity: int) -> Tensor:
    new = column.new_empty(capacity, *column.shape[1:])
    new[: len(rows)] = column[rows.to(column.device)]
    return new
