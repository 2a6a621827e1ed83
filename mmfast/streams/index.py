"""What is searched instead of the stored keys of one layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.core.kv import Clusters, Retriever
from mmfast.streams.rows import Rows


@dataclass(frozen=True, eq=False)
class Found:
    """Tokens of a block to read in one layer.

    Attributes:
        number: Of the block.
        tokens: `[m]` int64 ascending, among those the layer holds of it; None for all.
    """

    number: int
    tokens: Tensor | None


class LayerIndex:
    """Clusters of all stored blocks of a layer, and which token is in which of them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clusters = Rows()
        self._tokens = Rows()  # only of blocks with more than one cluster

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._clusters.nbytes + self._tokens.nbytes

    def add(self, number: int, clusters: Clusters) -> None:
        """Add a block, newer than all before."""
        means, counts = clusters.means.to(self._device), clusters.counts.to(self._device)
        self._clusters.append(number, means=means, counts=counts)
        if len(counts) > 1:
            self._tokens.append(number, cluster=clusters.owner.to("cpu", torch.int32))

    def drop(self, number: int) -> None:
        """Lose a block, if it is there."""
        self._clusters.drop(number)
        self._tokens.drop(number)

    def choose(self, query: Tensor, retriever: Retriever) -> list[Found]:
        """What a retriever reads for the query `[Hq, T, d]`, in time order."""
        if not len(self._clusters):
            return []
        owner, columns = self._clusters.view()
        index = Clusters(columns["means"], columns["counts"], owner.to(self._device))
        chosen = retriever.choose(query.to(self._device), index).cpu()
        numbers = owner[chosen].unique()
        first, end = self._clusters.spans(numbers)
        cluster = self._tokens.view()[1].get("cluster", torch.empty(0, dtype=torch.int32))
        spans = torch.stack([first, end, *self._tokens.spans(numbers)], 1).tolist()
        return [
            Found(number, _tokens(chosen[a:b], cluster[c:d]))
            for number, (a, b, c, d) in zip(numbers.tolist(), spans, strict=True)
        ]

    def snapshot(self) -> dict[str, Any]:
        """Plain data."""
        return {"clusters": self._clusters.snapshot(), "tokens": self._tokens.snapshot()}

    def restore(self, tree: dict[str, Any]) -> None:
        """Take over a snapshot."""
        self._clusters = Rows.restore(tree["clusters"], self._device)
        self._tokens = Rows.restore(tree["tokens"], torch.device("cpu"))


def _tokens(chosen: Tensor, cluster: Tensor) -> Tensor | None:
    """Tokens of a block whose cluster is chosen; None where that is all of them."""
    if bool(chosen.all()):
        return None
    return chosen[cluster.long()].nonzero()[:, 0]
