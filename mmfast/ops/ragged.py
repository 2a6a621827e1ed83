"""Rows of heads that hold unlike numbers of entries, one head behind the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RaggedRows:
    """Entries `flat` `[S, d]` of heads that hold `counts` of them.

    It stands for rows `[H, m, d]` as long as the longest head, with padding in front.
    """

    flat: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, rows: Tensor, stays: Tensor) -> RaggedRows:
        """Those of `rows` `[H, n, d]` that `stays` `[H, n]` marks."""
        return cls(rows[stays], tuple(stays.sum(-1).tolist()))

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(H, m, d)` with padding."""
        return len(self.counts), max(self.counts), int(self.flat.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the entries."""
        return int(self.flat.nbytes)

    def whole(self) -> Tensor:
        """Rows `[H, m, d]`, zeros at padding."""
        out = self.flat.new_zeros(self.shape)
        out[right_aligned(self.counts, self.flat.device)] = self.flat
        return out


def right_aligned(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Mark the last `counts` places `[H, m]` of as many as the largest has."""
    longest = max(counts)
    first = longest - torch.tensor(counts, device=device)[:, None]
    return torch.arange(longest, device=device) >= first
