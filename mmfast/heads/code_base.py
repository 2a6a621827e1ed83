"""Shared parts of heads over the codebooks of a frame: inputs of the backbone, and state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.core.kv import KVBlock
from mmfast.ops.codebooks import CodeLoss, code_loss

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
    """Codes of a step to what the backbone reads there: their sum; code V (`size`) is "none"."""

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
    """State of a head for B streams: its last frames `[B, t, K]`, and `kv` of layers along time."""

    codes: Tensor
    kv: KVBlock | None = None


class CodeMlp(nn.Module):
    """All codes of a frame from the hidden state, the token in front and the frame before.

    It predicts the K codebooks of `size` entries that the depth transformer predicts; `first` is
    the number of values of the token in front of them, `dim` the inner width.
    """

    def __init__(self, hidden: int, codes: int, size: int, first: int, dim: int = 256) -> None:
        super().__init__()
        self.codes, self.size = codes, size
        self.state = nn.Linear(hidden, dim)
        self.front = nn.Embedding(first, dim)
        self.before = CodeEmbed(codes, size, dim)
        self.mix = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, codes * size, bias=False)

    def guess(self, hidden: Tensor, first: Tensor, before: Tensor) -> Tensor:
        """Hidden `[B, D]`, first `[B]`, codes of the frame before `[B, K]` to `[B, K, V]`."""
        x = F.silu(self.state(hidden) + self.front(first) + self.before(before))
        x = x + F.silu(self.mix(x))
        logits: Tensor = self.out(x).unflatten(-1, (self.codes, self.size))
        return logits

    def loss(self, hidden: Tensor, first: Tensor, codes: Tensor, start: Tensor) -> CodeLoss:
        """Cross-entropy on `codes` `[B, T, K]`, what the depth transformer said, or recordings.

        `hidden` is `[B, T, D]`, `first` `[B, T]`, and `start` `[B, K]` the frame before the first.
        """
        before = torch.cat([start[:, None], codes[:, :-1]], dim=1)
        before = before.where((before >= 0) & (before < self.size), self.size)
        logits = self.guess(hidden.flatten(0, 1), first.flatten(), before.flatten(0, 1))
        return code_loss(logits, codes.flatten(0, 1))
