"""What heads over the codebooks of a frame have in common: inputs of the backbone, and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mmfast.ops.stream_kv import StreamKV

# Logits [..., V] to codes [...].
Choose = Callable[[Tensor], Tensor]


class Wide(Protocol):
    """A language model's parts, of which these heads need the width alone."""

    @property
    def width(self) -> int:
        """Width D of its hidden states."""


def width_of(hidden: int | Wide) -> int:
    """The width of hidden states, given itself or with the model (`make_head`, `load_head`)."""
    return hidden if isinstance(hidden, int) else hidden.width


def likeliest(logits: Tensor) -> Tensor:
    """Greedy choice."""
    return logits.argmax(-1)


class CodeEmbed(nn.Module):
    """Codes of a step to what the backbone reads there: the sum over the codebooks.

    Args:
        codes: Codebooks K.
        size: Entries V; code V stands for "none".
        hidden: Width of the backbone.
    """

    offsets: Tensor

    def __init__(self, codes: int, size: int, hidden: int) -> None:
        super().__init__()
        self.table = nn.Embedding(codes * (size + 1), hidden)
        nn.init.normal_(self.table.weight, std=0.02)
        offsets = torch.arange(codes) * (size + 1)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, codes: Tensor) -> Tensor:
        """`[..., K]` to `[..., D]`."""
        summed: Tensor = self.table(codes + self.offsets).sum(-2)
        return summed


@dataclass(frozen=True, eq=False)
class CodeState:
    """What a head remembers of B streams; a value.

    Attributes:
        codes: `[B, t, K]` its last frames.
        kv: Of layers along time, where it has some.
    """

    codes: Tensor
    kv: StreamKV | None = None
