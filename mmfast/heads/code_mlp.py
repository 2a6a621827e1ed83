"""A small drafter of all codes of a frame, for a depth transformer to check."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.heads.code_base import CodeEmbed
from mmfast.ops.codebook_loss import CodeLoss, code_loss


class CodeMlp(nn.Module):
    """All codes of a frame from the hidden state, the token in front and the frame before.

    Args:
        hidden: Width of the backbone's hidden state.
        codes: Codebooks K that the depth transformer predicts.
        size: Entries per codebook V.
        first: Values of the token in front of the codes.
        dim: Inner width.
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
        """Cross-entropy on what the depth transformer said, or on recordings.

        Args:
            hidden: `[B, T, D]`.
            first: `[B, T]`.
            codes: `[B, T, K]`.
            start: `[B, K]` the frame before the first.
        """
        before = torch.cat([start[:, None], codes[:, :-1]], dim=1)
        before = before.where((before >= 0) & (before < self.size), self.size)
        logits = self.guess(hidden.flatten(0, 1), first.flatten(), before.flatten(0, 1))
        return code_loss(logits, codes.flatten(0, 1))
