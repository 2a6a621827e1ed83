"""Blocks of keys that a prompt reads: a choice as data, and the protocol of what chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

_AT_ONCE = 2**22  # counts of keys that are made at a time


@dataclass(frozen=True, eq=False)
class BlockChoice:
    """Keys that the queries of a part of a prompt read, in blocks of `size`.

    Queries are counted from the first one of the part, keys from the first one in the cache. Those
    of a block of queries read, of the keys before the block, the blocks chosen for it and the
    columns chosen for all; inside their own block they read every key up to themselves.

    Attributes:
        blocks: `[H, q, k]` bool; H choices, one for each query head or for each group of them that
            shares a key head.
        size: Tokens of a block of queries.
        columns: `[H, S]` bool, keys that all later blocks of queries read; None where there are
            none.
        order: `[H, S]`, the key at each place: blocks of keys are cut from the keys in this order.
            None where that is the order of time.
        width: Tokens of a block of keys; None where they are as many as those of queries.
    """

    blocks: Tensor
    size: int
    columns: Tensor | None = None
    order: Tensor | None = None
    width: int | None = None

    @property
    def wide(self) -> int:
        """Tokens of a block of keys."""
        return self.size if self.width is None else self.width

    def seen(self, head: int, row: int, first: int) -> Tensor:
        """Places `[n]` of the keys before key `first` that block `row` of the queries reads."""
        size = self.columns.shape[1] if self.columns is not None else first
        if self.order is not None:
            size = self.order.shape[1]
        mask = self.blocks[head, row].repeat_interleave(self.wide)[:size]
        if mask.shape[0] < size:
            mask = functional.pad(mask, (0, size - mask.shape[0]))
        places = self.order[head] if self.order is not None else None
        if self.columns is not None:
            chosen = self.columns[head]
            mask = mask | (chosen if places is None else chosen[places])
        mask = mask[:first] if places is None else mask & (places < first)
        return mask.nonzero()[:, 0]

    def reads(self, length: int, n: int) -> Tensor:
        """Keys `[H]` that a query reads, mean over the `length` queries whose last key is n - 1."""
        heads, rows, count = self.blocks.shape
        device, size, wide = self.blocks.device, self.size, self.wide
        starts = torch.arange(rows, device=device) * size
        places = torch.arange(n, device=device).expand(heads, -1)
        places = places if self.order is None else self.order
        cut = functional.pad(places, (0, count * wide - n), value=n).view(heads, count, wide)
        marked = None
        if self.columns is not None:
            marks = self.columns if self.order is None else self.columns.gather(1, self.order)
            marks = functional.pad(marks, (0, count * wide - n)).view(heads, count, wide)
            marked = torch.where(marks, cut, n).sort(-1).values
        cut, parts = cut.sort(-1).values, list[Tensor]()
        step = max(1, _AT_ONCE // (heads * count))  # single keys times blocks of queries are many
        before = (starts + n - length).split(step)
        for firsts, blocks in zip(before, self.blocks.split(step, 1), strict=True):
            part = _early(cut, firsts, blocks)
            parts.append(part if marked is None else part + _early(marked, firsts, ~blocks))
        read = torch.cat(parts, 1)
        queries = (length - starts).clamp_max(size)
        pairs = (read * queries).sum(-1) + (queries * (queries + 1) // 2).sum()
        return pairs / length


def _early(cut: Tensor, firsts: Tensor, blocks: Tensor) -> Tensor:
    """Number `[H, q]` of the keys `cut` `[H, k, w]`, ascending, of `blocks` before `firsts` `[q]`.

    `blocks` `[H, q, k]` are the blocks of keys that each block of queries reads.
    """
    ends = firsts.expand(*cut.shape[:2], -1).contiguous()
    return (torch.searchsorted(cut, ends).transpose(1, 2) * blocks).sum(-1)


@dataclass(frozen=True, eq=False)
class PromptLayer:
    """One layer at one part of a prompt, as a method that chooses blocks of keys sees it.

    Attributes:
        query: `[H, G, L, d]` behind RoPE, the G query heads of a choice side by side.
        keys: `[H, S, d]` of all tokens so far, those of the part last; no padding.
        scale: Factor of the logits.
    """

    query: Tensor
    keys: Tensor
    scale: float

    @property
    def heads(self) -> int:
        """Number of choices."""
        return self.keys.shape[0]

    @property
    def length(self) -> int:
        """Number of queries."""
        return self.query.shape[2]

    @property
    def n(self) -> int:
        """Number of keys."""
        return self.keys.shape[1]

    @property
    def before(self) -> int:
        """Number of keys before the first query."""
        return self.n - self.length


class BlockSelector(Protocol):
    """A method that chooses what a prompt reads, with settings and without state.

    Registered as a function `(budget, **knobs) -> BlockSelector` of kind `prefill`. Parts of a
    prompt of fewer than `least` tokens read everything. With `share`, query heads that share a key
    head share a choice, which is then made by their sums.
    """

    @property
    def least(self) -> int:
        """Tokens from which on it chooses."""

    @property
    def share(self) -> bool:
        """Heads that share keys share the choice."""

    def choose(self, layer: PromptLayer) -> BlockChoice:
        """Choose for all heads of a layer."""
