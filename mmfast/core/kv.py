"""Keys and values as data: blocks as values, and protocols of methods that read a part of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, eq=False)
class StepChoice:
    """Entries of one layer that a query reads: some of those before `tail`, and all from there on.

    Attributes:
        pages: `[B, 1 or H, P]`, numbers of runs of `page` entries; None reads everything.
        page: Entries of a run.
        tail: Entries from this one on are read.
        real: `[B, 1 or H, P]`, False at fillers of heads that read fewer; None without any.
        nbytes: Bytes that were read in order to choose.
        ahead: What the next step will read, which is fetched from host memory meanwhile; it has
            to return the same `pages`.
        onward: The next layer reads the same where it holds the same entries, and they are fetched
            from host memory while this layer computes; it has to return the same `pages`.
    """

    pages: Tensor | None = None
    page: int = 1
    tail: int = 0
    real: Tensor | None = None
    nbytes: int = 0
    ahead: StepChoice | None = None
    onward: bool = False

    def entries(self, n: int) -> tuple[Tensor, Tensor | None]:
        """Return the places `[B, 1 or H, m]` among n entries, and False where one is a filler."""
        pages, real = self.pages, self.real
        assert pages is not None
        inside = torch.arange(self.page, device=pages.device)
        index = pages if self.page == 1 else (pages[..., None] * self.page + inside).flatten(-2)
        rest = torch.arange(self.tail, n, device=pages.device).expand(*index.shape[:-1], -1)
        if real is not None:
            real = real if self.page == 1 else real.repeat_interleave(self.page, -1)
            real = torch.cat([real, torch.ones_like(rest, dtype=torch.bool)], -1)
        return torch.cat([index, rest], -1), real


@dataclass(eq=False)
class LayerStep:
    """One layer at one decode step, as a method that chooses what attention reads sees it.

    Attributes:
        query: `[B, H, G, d]` behind RoPE, the G query heads that share a key head side by side.
        keys: `[B, H, n, d]` of all entries in order of time, the newest among them; no padding. In
            host memory under a method with `host`.
        scale: Factor of the logits.
        depth: Number of the layer among the `depths` that the policy acts on.
        stays: `[n]` bool, entries that are read anyway; None where there are none.
        visual: `[n]` bool, tokens of pictures, clips and sounds, of one row; None where they are
            not known; for methods that need `kind`.
        sentence: `[1 or H, n]`, number of the sentence, frame or picture of each entry, of one row,
            ascending, -1 where it is not known; for methods that need it.
        same: The layer holds entries of the same tokens as the one of `depth - 1`.
        memory: State that the method keeps with the entries of this layer. Its values have
            `trim(entries) -> bool`, which is called when entries at the end are taken back and
            tells whether the state is still of use. All of it goes when entries change otherwise.
        shared: State of this step, from layer to layer.
    """

    query: Tensor
    keys: Tensor
    scale: float
    depth: int
    depths: int
    stays: Tensor | None = None
    visual: Tensor | None = None
    sentence: Tensor | None = None
    same: bool = False
    memory: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """Number of entries."""
        return int(self.keys.shape[2])


class StepSelector(Protocol):
    """A method that chooses at every decode step which entries attention reads.

    Registered as a function `(budget, **knobs) -> StepSelector` of role `select`; it holds settings
    and no state.
    """

    @property
    def alone(self) -> bool:
        """Rows of a batch are given one by one."""

    @property
    def across(self) -> bool:
        """Layers read at places that others chose, so that all have to hold the same entries."""

    @property
    def host(self) -> bool:
        """Keys and values lie in host memory, and what is read is fetched from there."""

    @property
    def beside(self) -> float:
        """Most bytes kept beside the entries of a layer, as a share of the bytes of these."""

    def check(self, depths: int) -> None:
        """Refuse (SpecError) a model with so many layers, of which none would read a part."""

    def choose(self, step: LayerStep) -> StepChoice:
        """Choose what one layer reads at one step."""
