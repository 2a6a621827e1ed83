"""Rows of heads that hold unlike numbers of entries, or not all of their channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.core.spec import count
from mmfast.ops.ranking import stable_topk


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


@dataclass(frozen=True, eq=False)
class ThinRows:
    """Rows `[H, n, d]` of which each head holds the channels `kept`; the others are zero."""

    data: Tensor  # [H, n, k]
    kept: Tensor  # [H, k] int16, ascending
    width: int  # d

    @classmethod
    def of(cls, rows: Tensor, kept: Tensor) -> ThinRows:
        """The channels `kept` `[H, k]` of `rows` `[H, n, d]`, copied."""
        data = rows.gather(-1, kept[:, None].expand(-1, rows.shape[1], -1))
        return cls(data, kept.to(torch.int16), rows.shape[-1])

    @property
    def shape(self) -> tuple[int, int, int]:
        """`(H, n, d)` with the channels that are zero."""
        return int(self.data.shape[0]), int(self.data.shape[1]), self.width

    @property
    def nbytes(self) -> int:
        """Bytes of what is held, and of the numbers of channels."""
        return int(self.data.nbytes + self.kept.nbytes)

    def whole(self) -> Tensor:
        """Rows `[H, n, d]`."""
        where = self.kept.long()[:, None].expand(self.data.shape)
        return self.data.new_zeros(self.shape).scatter_(-1, where, self.data)


@dataclass(frozen=True)
class ChannelPruner:
    """Settings of a store that leaves out channels of keys; it holds no state."""

    channels: int | float  # share or number that stays
    window: int  # last queries that say which
    residual: int  # last tokens that keep all

    @staticmethod
    def score(keys: Tensor, power: Tensor) -> Tensor:
        """Score channels `[H, d]` of all keys `[H, n, d]`, by the squares `[H, d]` of queries."""
        return keys.double().square().mean(1) * power.double()

    def prune(self, keys: Tensor, score: Tensor) -> ThinRows:
        """Leave out the channels of keys `[H, n, d]` that score `[H, d]` least."""
        width = keys.shape[-1]
        channels = self.channels if isinstance(self.channels, float) else min(self.channels, width)
        kept = count(channels, width)
        assert kept is not None
        return ThinRows.of(keys, stable_topk(score, kept))


def right_aligned(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Mark the last `counts` places `[H, m]` of as many as the largest has."""
    longest = max(counts)
    first = longest - torch.tensor(counts, device=device)[:, None]
    return torch.arange(longest, device=device) >= first
