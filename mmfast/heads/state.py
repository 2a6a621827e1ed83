"""What a head keeps of its streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmfast.ops.row_cache import Slot


@dataclass(eq=False)
class HeadState:
    """What a head keeps of B streams.

    Attributes:
        embeds: `[B, capacity, D]` embeddings of the tokens, drafts included.
        hidden: `[B, capacity, D]` hidden states of the backbone.
        length: Per stream the tokens that the backbone has read and that stand.
        filled: Per module and stream the positions whose keys are those of tokens that stand.
        first: Per module and stream the oldest position it has keys of.
        slots: Keys and values per module.
    """

    embeds: Tensor
    hidden: Tensor
    length: list[int]
    filled: list[list[int]]
    first: list[list[int]]
    slots: list[Slot] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        own = sum(t.numel() * t.element_size() for t in (self.embeds, self.hidden))
        return own + sum(slot.nbytes for slot in self.slots)


def room(state: HeadState, needed: int) -> None:
    """Make the buffers of a state hold `needed` tokens."""
    have = state.embeds.shape[1]
    if needed <= have:
        return
    for name in ("embeds", "hidden"):
        old = getattr(state, name)
        new = old.new_zeros(old.shape[0], max(needed, have + have // 2), old.shape[2])
        new[:, :have].copy_(old)
        setattr(state, name, new)


def gather(buffer: Tensor, starts: Sequence[int], n: int, offset: int = 0) -> Tensor:
    """`[B, n, D]` from each stream's own start."""
    start = starts[0] + offset
    if len(starts) == 1 or all(s == starts[0] for s in starts):
        return buffer[:, start : start + n]
    return torch.stack([row[s + offset :][:n] for row, s in zip(buffer, starts, strict=True)])


def at(hidden: Tensor, last: Sequence[int]) -> Tensor:
    """`[B, D]`: one place of each stream."""
    if len(last) == 1 or all(i == last[0] for i in last):
        return hidden[:, last[0]]
    return torch.stack([row[i] for row, i in zip(hidden, last, strict=True)])
