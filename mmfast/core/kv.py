"""Keys and values as data: blocks of a stream, and the protocol of methods that retrieve them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """Keys and values of consecutive tokens of one conversation, over all layers.

    Keys are kept before RoPE and rotated once, to the place of the block when it is read, so that
    moving a block any number of times costs no precision. The axes A of positions are 1, or 3 under
    M-RoPE.

    Attributes:
        kind: `text` or `frame`.
        time: Seconds of the frame on the stream's clock; None for text.
        relative: `[A, n]` int64 positions of its tokens from the block's start.
        advance: `[A]` int64, distance from this block's start to that of the next block.
        keys: Per layer `[H, n_l, d]`, before RoPE; values are alike.
        kept: Per layer the tokens that a policy kept, `[n_l]` ascending; None where all n are.
    """

    number: int
    kind: str
    time: float | None
    relative: Tensor
    advance: Tensor
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    kept: tuple[Tensor | None, ...] = ()

    @property
    def n(self) -> int:
        """Number of tokens that the language model read."""
        return self.relative.shape[-1]

    def positions(self, layer: int) -> Tensor:
        """Relative positions `[A, n_l]` of the tokens that a layer holds."""
        kept = self.kept[layer] if self.kept else None
        return self.relative if kept is None else self.relative.index_select(-1, kept)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))


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
