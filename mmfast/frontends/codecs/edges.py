"""The ends of a stream: copies of its first and last sample, and no more out than is due."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmfast.frontends.codecs.layers import Layer, join


class End(NamedTuple):
    """The last sample so far."""

    last: Tensor | None  # [B, C, 1]


class Edge:
    """`left` copies of the first sample before a stream, `right` copies of the last behind it."""

    in_step = False

    def __init__(self, left: int, right: int) -> None:
        self.left, self.right = left, right

    def start(self, batch: int) -> End:
        """No sample yet."""
        return End(None)

    def step(self, state: End, x: Tensor) -> tuple[End, Tensor]:
        """`[B, C, t]`, with copies before the first."""
        if not x.shape[-1]:
            return state, x
        copies = x[..., :1].expand(*x.shape[:2], self.left)
        out = torch.cat([copies, x], -1) if state.last is None else x
        return End(x[..., -1:].clone()), out

    def finish(self, state: End) -> Tensor | None:
        """Copies behind the last."""
        if state.last is None:
            return None
        return state.last.expand(*state.last.shape[:2], self.right)

    def count(self, n: int) -> int:
        """One for one, and those before the first."""
        return n + self.left if n else 0


class Due(NamedTuple):
    """How much has come, and gone."""

    inner: Any
    total: int
    given: int


class Capped:
    """A layer of whose end only as much is let out as `ratio` times the input."""

    def __init__(self, layer: Layer, ratio: int) -> None:
        self.layer, self.ratio, self.in_step = layer, ratio, layer.in_step

    def start(self, batch: int) -> Due:
        """Nothing has come."""
        return Due(self.layer.start(batch), 0, 0)

    def step(self, state: Due, x: Tensor) -> tuple[Due, Tensor]:
        """As the layer."""
        inner, out = self.layer.step(state.inner, x)
        return Due(inner, state.total + x.shape[-1], state.given + out.shape[-1]), out

    def finish(self, state: Due) -> Tensor | None:
        """What is still due."""
        tail = join(None, self.layer.finish(state.inner))
        return None if tail is None else tail[..., : self.ratio * state.total - state.given]

    def count(self, n: int) -> int:
        """As the layer."""
        return self.layer.count(n)
