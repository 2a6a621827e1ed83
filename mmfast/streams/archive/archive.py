"""The archive of a stream: every block that left the window, found again and read by question."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.kv import Clusters, KVBlock, Numbers, Retriever
from mmfast.ops.quantisation import Quantiser, unpacked
from mmfast.streams.archive.tiers import Reports, TierQuotas, Tiers, stored

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

    def within(self, name: str, first: int, end: int) -> Tensor:
        """Return a column of the rows that are left of the blocks from `first` to before `end`."""
        owner = self._owner[self._head : self._tail]
        start, stop = (self._head + int(owner.searchsorted(number)) for number in (first, end))
        alive = torch.from_numpy(self._alive[start:stop])
        column = self._columns[name][start:stop]
        return column[alive.to(column.device)]

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


@dataclass(frozen=True, eq=False)
class Found:
    """Tokens of block `number` to read: `[m]` int64 ascending, None for all the layer holds."""

    number: int
    tokens: Tensor | None

    def same(self, other: Found) -> bool:
        """Tell whether two are the same tokens."""
        if self.tokens is None or other.tokens is None:
            return self.number == other.number and self.tokens is other.tokens
        return self.number == other.number and torch.equal(self.tokens, other.tokens)


class GroupMeans:
    """Sums of the mean keys of groups of successive blocks, in step with the rows of an index.

    What a block adds is added once; where one leaves, its group is summed anew, so that nothing
    drifts over days.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._sums, self._counts = torch.empty(0), torch.empty(0)
        self._first = 0  # number of the group of the first row

    @property
    def nbytes(self) -> int:
        """Bytes held, spare capacity included."""
        return self._sums.nbytes + self._counts.nbytes

    def add(self, number: int, means: Tensor) -> None:
        """Count in the means `[k, H, d]` of a block."""
        at = number // self.size - self._first
        if at >= len(self._counts):
            at = self._make_room(number // self.size, means)
        self._sums[at] += means.sum(0)
        self._counts[at] += len(means)

    def _make_room(self, group: int, like: Tensor) -> int:
        """Leave out the groups in front that are empty, and double the rest."""
        there = self._counts.nonzero()[:1, 0].tolist()
        empty = there[0] if there else len(self._counts)
        first = self._first + empty if there else group
        live = len(self._counts) - empty
        capacity = max(_LEAST, 2 * live, group - first + 1)
        sums = like.new_zeros(capacity, *like.shape[1:])
        counts = like.new_zeros(capacity)
        if live:
            sums[:live], counts[:live] = self._sums[empty:], self._counts[empty:]
        self._sums, self._counts, self._first = sums, counts, first
        return group - first

    def drop(self, number: int, rows: Rows) -> None:
        """Sum the group of a block anew whose row has been dropped."""
        group = number // self.size
        at = group - self._first
        if 0 <= at < len(self._counts):
            left = rows.within("means", group * self.size, (group + 1) * self.size)
            self._sums[at], self._counts[at] = left.sum(0), len(left)

    def choose(
        self, query: Tensor, pick: Callable[[Tensor, Tensor], Tensor], newest: int
    ) -> Tensor:
        """Return the numbers `[g]` of the groups that `pick` finds by the query and their means.

        Groups that begin behind block `newest` are left out.
        """
        there = self._counts[: newest // self.size + 1 - self._first].nonzero()[:, 0]
        means = self._sums[there] / self._counts[there][:, None, None]
        return (there[pick(query, means)] + self._first).sort().values.cpu()


class LayerIndex:
    """Clusters of all stored blocks of a layer, and which token is in which of them."""

    def __init__(self, device: torch.device, group: int = 0) -> None:
        """Make an empty index; `group` blocks have a mean together, 0 keeps none."""
        self._device = device
        self._groups = GroupMeans(group) if group else None
        self._clusters = Rows()
        self._tokens = Rows()  # only of blocks with more than one cluster

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._clusters.nbytes + self._tokens.nbytes + self.group_bytes

    @property
    def group_bytes(self) -> int:
        """Bytes of the means of groups alone."""
        return 0 if self._groups is None else self._groups.nbytes

    def add(self, number: int, clusters: Clusters) -> None:
        """Add a block, newer than all before."""
        means, counts = clusters.means.to(self._device), clusters.counts.to(self._device)
        self._clusters.append(number, means=means, counts=counts)
        if self._groups is not None:
            self._groups.add(number, means)
        if len(counts) > 1:
            self._tokens.append(number, cluster=clusters.owner.to("cpu", torch.int32))

    def drop(self, number: int) -> None:
        """Lose a block, if it is there."""
        self._clusters.drop(number)
        self._tokens.drop(number)
        if self._groups is not None:
            self._groups.drop(number, self._clusters)

    def choose(self, query: Tensor, retriever: Retriever, newest: int | None = None) -> list[Found]:
        """Return the tokens that a retriever reads for the query `[Hq, T, d]`, in time order.

        They are of the blocks up to `newest`; None is all.
        """
        if not len(self._clusters):
            return []
        owner, columns = self._clusters.view()
        if newest is not None:
            n = int(torch.searchsorted(owner, newest, right=True))
            owner, columns = owner[:n], {name: rows[:n] for name, rows in columns.items()}
        if not len(owner):
            return []
        query = query.to(self._device)
        if self._groups is not None and hasattr(retriever, "groups"):
            return self._choose_in_groups(query, retriever, owner, columns)
        index = Clusters(columns["means"], columns["counts"], owner.to(self._device))
        chosen = retriever.choose(query, index).cpu()
        numbers = owner[chosen].unique()
        first, end = self._clusters.spans(numbers)
        cluster = self._tokens.view()[1].get("cluster", torch.empty(0, dtype=torch.int32))
        spans = torch.stack([first, end, *self._tokens.spans(numbers)], 1).tolist()
        return [
            Found(number, _tokens(chosen[a:b], cluster[c:d]))
            for number, (a, b, c, d) in zip(numbers.tolist(), spans, strict=True)
        ]

    def _choose_in_groups(
        self, query: Tensor, retriever: Any, owner: Tensor, columns: dict[str, Tensor]
    ) -> list[Found]:
        """Read no means but those of the groups, and of the blocks in the best of them."""
        assert self._groups is not None
        groups = self._groups.choose(query, retriever.groups, int(owner[-1]))
        bounds = torch.stack([groups, groups + 1]) * self._groups.size
        starts, ends = torch.searchsorted(owner, bounds).tolist()
        rows = torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)])
        taken = {name: column[rows.to(self._device)] for name, column in columns.items()}
        index = Clusters(taken["means"], taken["counts"], owner[rows].to(self._device))
        chosen = retriever.within(query, index).cpu()
        return [Found(number, None) for number in owner[rows][chosen].tolist()]

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        return {"clusters": self._clusters.snapshot(), "tokens": self._tokens.snapshot()}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot."""
        self._clusters = Rows.restore(tree["clusters"], self._device)
        self._tokens = Rows.restore(tree["tokens"], torch.device("cpu"))
        if self._groups is not None:  # of other groups, perhaps
            self._groups = GroupMeans(self._groups.size)
            owner, columns = self._clusters.view()
            for number, mean in zip(owner.tolist(), columns.get("means", ()), strict=True):
                self._groups.add(number, mean[None])


def _tokens(chosen: Tensor, cluster: Tensor) -> Tensor | None:
    """Tokens of a block whose cluster is chosen; None where that is all of them."""
    if bool(chosen.all()):
        return None
    return chosen[cluster.long()].nonzero()[:, 0]


REPORTED = ("dropped", "corrupt", "lost", "disk_errors")


class Archive:
    """Stored blocks of one stream within byte quotas, with an index per layer to search them.

    The cost of adding a block does not depend on how many there are. Nothing here raises because
    a disk is full, gone or damaged: the blocks it takes along are dropped and reported.
    """

    def __init__(
        self,
        retriever: Retriever,
        layers: int,
        device: torch.device | str = "cpu",
        tiers: TierQuotas | None = None,
        store: Quantiser | None = None,
    ) -> None:
        """Make an empty archive for a language model of so many `layers`.

        `retriever` chooses what is read; `device` is where parts are wanted and the index lies;
        without `tiers` main memory alone is used; `store` packs blocks that leave the device.
        """
        self.reports = Reports()
        self._retriever = retriever
        self._device = torch.device(device)
        group = int(getattr(retriever, "group", 0))
        self._index = [LayerIndex(self._device, group) for _ in range(layers)]
        self._gone: list[int] = []  # numbers that the tiers lost, until the index forgets them
        self._tiers = Tiers(tiers or TierQuotas(), store, self.reports, self._gone.append)
        self._newest = -1

    def put(self, block: KVBlock) -> None:
        """Add a block newer than all before, else MmfastError; quotas push the oldest out."""
        if block.number <= self._newest or len(block.keys) != len(self._index):
            raise MmfastError(
                f"block {block.number} of {len(block.keys)} layers cannot follow block "
                f"{self._newest} in an archive of {len(self._index)} layers; put blocks in order"
            )
        clusters = [self._retriever.represent(k) if k.shape[1] else None for k in block.keys]
        self._newest = block.number
        for index, found in zip(self._index, clusters, strict=True):
            if found is not None:
                index.add(block.number, found)
        self._tiers.put(stored(block))
        self._unindex()

    def choose(self, layer: int, query: Tensor, newest: int | None = None) -> list[Found]:
        """Choose tokens of a layer for the queries `[Hq, T, d]` (before RoPE) of a question.

        They are of the blocks up to `newest`; None is all.
        """
        return self._index[layer].choose(query, self._retriever, newest)

    def read(self, layer: int, found: Sequence[Found]) -> list[KVBlock]:
        """Read one layer of what was found, in order; damaged blocks are dropped and reported."""
        parts = [self._part(layer, each) for each in found]
        self._unindex()
        return [part for part in parts if part is not None]

    def _part(self, layer: int, found: Found) -> KVBlock | None:
        block = self._tiers.read(found.number, layer)
        if block is None:
            return None
        tokens, relative = found.tokens, block.positions(0)

        def taken(part: Numbers, _: bool) -> Tensor:
            x = unpacked(part)
            x = x if tokens is None else x.index_select(1, tokens.to(x.device))
            return x.to(self._device)

        relative = relative if tokens is None else relative.index_select(-1, tokens)
        relative, advance = (x.to(self._device) for x in (relative, block.advance))
        return replace(block.each(taken), relative=relative, advance=advance, kept=())

    def forget(self, number: int) -> None:
        """Forget a block, if it is there."""
        self._tiers.remove(number)
        self._gone.append(number)
        self._unindex()

    def _unindex(self) -> None:
        for number in self._gone:
            for index in self._index:
                index.drop(number)
        self._gone.clear()

    def numbers(self) -> list[int]:
        """Numbers of the stored blocks, ascending."""
        return sorted(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def nbytes(self) -> int:
        """Bytes of blocks and index together, on all tiers."""
        return sum(self._tiers.nbytes.values()) + self._index_bytes()

    def _index_bytes(self) -> int:
        return sum(index.nbytes for index in self._index)

    def stats(self) -> dict[str, Any]:
        """Blocks and bytes per tier, bytes of the index, losses, and latest `reports` in words."""
        return {
            "blocks": self._tiers.blocks,
            "bytes": self._tiers.nbytes,
            "index_bytes": self._index_bytes(),
            **{kind: self.reports.counts[kind] for kind in REPORTED},
            "reports": list(self.reports.lines),
        }

    def snapshot(self) -> dict[str, Any]:
        """All state; blocks on disk as files, which `snapshots.save` links or copies."""
        return {
            "newest": self._newest,
            "tiers": self._tiers.snapshot(),
            "index": [index.snapshot() for index in self._index],
            "reports": self.reports.snapshot(),
        }

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot of an archive with the same retriever; quotas may differ."""
        self._newest = tree["newest"]
        self.reports.restore(tree["reports"])
        for index, row in zip(self._index, tree["index"], strict=True):
            index.restore(row)
        self._tiers.restore(tree["tiers"], self._device)
        self._unindex()

    def close(self) -> None:
        """Release everything, files of the disk tier included."""
        self._gone += self.numbers()
        self._unindex()
        self._tiers.close()
