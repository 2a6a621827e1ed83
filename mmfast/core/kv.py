"""Keys and values as data: blocks as values, and the protocol of methods that retrieve them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

Numbers = Any  # a tensor, or one in few bits (`ops.quantisation.PackedTensor`)


@dataclass(frozen=True, eq=False)
class KVBlock:
    """Keys and values of layers as a value: nothing writes to it, so it may leave and come back.

    It holds consecutive tokens of one conversation, or all that B streams remember. Keys that may
    move are kept before RoPE and rotated once, to the place of the block when it is read, so that
    moving a block any number of times costs no precision. The axes A of positions are 1, or 3 under
    M-RoPE.

    Attributes:
        keys: Per layer `[H, n_l, d]`, of streams `[B, H, n, d]`; values are alike.
        relative: `[A, n]` int64 positions of its tokens from the block's start; of streams `[B, n]`
            from theirs, -1 where a stream has none.
        advance: `[A]` or `[B]` int64, distance from this start to that of what comes next.
        kept: Per layer the tokens that a policy kept, `[n_l]` ascending; None where all n are.
        kind: `text` or `frame`.
        time: Seconds of the frame on the stream's clock; None for text.
    """

    keys: tuple[Numbers, ...] = ()
    values: tuple[Numbers, ...] = ()
    # No default tensors: a compiled step could not make a block. None where nothing has places.
    relative: Tensor = None  # type: ignore[assignment]
    advance: Tensor = None  # type: ignore[assignment]
    kept: tuple[Tensor | None, ...] = ()
    number: int = 0
    kind: str = "text"
    time: float | None = None

    @property
    def n(self) -> int:
        """Number of tokens that the language model read."""
        return self.relative.shape[-1]

    def positions(self, layer: int) -> Tensor:
        """Relative positions `[A, n_l]` of the tokens that a layer holds."""
        kept = self.kept[layer] if self.kept else None
        return self.relative if kept is None else self.relative.index_select(-1, kept)

    def layer(self, index: int) -> KVBlock:
        """The block with one layer alone."""
        part = slice(index, index + 1)
        return replace(self, keys=self.keys[part], values=self.values[part], kept=self.kept[part])

    def each(self, change: Callable[[Numbers, bool], Numbers]) -> KVBlock:
        """Apply `(numbers, whether keys)` to the keys and values of all layers."""
        keys = tuple(change(each, True) for each in self.keys)
        return replace(self, keys=keys, values=tuple(change(each, False) for each in self.values))

    def to(self, device: torch.device) -> KVBlock:
        """Keys and values on another device."""
        return self.each(lambda part, _: part.to(device))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(each.nbytes for each in (*self.keys, *self.values))


@dataclass(frozen=True, eq=False)
class Clusters:
    """Summary of the stored tokens of one layer, which a query is compared with.

    A cluster has the mean key `means` `[C, H, d]`, before RoPE, of `counts` `[C]` tokens. `owner`
    is the cluster of each token `[n]` in one block, or the block of each cluster `[C]` in an index
    of many.
    """

    means: Tensor
    counts: Tensor
    owner: Tensor


class Retriever(Protocol):
    """A method that chooses stored tokens for a query, with settings and without state.

    Registered as a function `(budget, **knobs) -> Retriever` of role `retrieve`.
    """

    def represent(self, keys: Tensor) -> Clusters:
        """Cluster the keys `[H, n, d]` (before RoPE) of one layer of one block."""

    def choose(self, query: Tensor, index: Clusters) -> Tensor:
        """Choose the clusters to read of an index of many blocks, as a mask `[C]`.

        `query` `[Hq, T, d]` are the queries of all T tokens of a question, before RoPE; Hq is a
        multiple of H.
        """
