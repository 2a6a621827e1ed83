"""Layers that work on a stream: what they hold back is a value, handed in and out.

All of them take and give `[B, C, t]`, for any t, none included. A layer is in step when t inputs
give exactly t * up / down outputs at once, for every chunk of whole frames: then a row of a batch
can begin anew while the others go on. Other layers wait: for the first samples (reflection), or
for later ones (convolutions that look ahead).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError


class Layer(Protocol):
    """One layer, or a stack of them."""

    in_step: bool

    def start(self, batch: int) -> Any:
        """The state of `batch` streams before their first sample."""

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        """Inputs `[B, C, t]` to what they make certain."""

    def finish(self, state: Any) -> Tensor | None:
        """What is left at the end; None where that is nothing, whatever came before."""

    def count(self, n: int) -> int:
        """How many outputs are certain after `n` inputs."""


class Pointwise:
    """A function of each moment alone: activations, tables of codes.

    Args:
        function: From `[B, …, t]` to `[B, *shape, t]`.
        shape: Dimensions of its output between the batch and time; None: those of its input.
        dtype: Type of its output, where it is not that of its input.
    """

    in_step = True

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.function, self.shape, self.dtype = function, shape, dtype

    def start(self, batch: int) -> Any:
        """Nothing is held back."""
        return ()

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        """Moment by moment; of none, none."""
        if x.shape[-1]:
            return state, self.function(x)
        shape = x.shape[1:-1] if self.shape is None else self.shape
        return state, x.new_zeros(x.shape[0], *shape, 0, dtype=self.dtype)

    def finish(self, state: Any) -> Tensor | None:
        """Nothing."""
        return None

    def count(self, n: int) -> int:
        """One for one."""
        return n


class Recurrent:
    """An LSTM beside a skip connection, as in EnCodec: y = lstm(x) + x."""

    in_step = True

    def __init__(self, lstm: nn.LSTM) -> None:
        if lstm.bidirectional or lstm.batch_first or lstm.proj_size:
            raise ModelError("cannot stream this LSTM; give one that goes forward, time first")
        self.lstm = lstm

    def start(self, batch: int) -> tuple[Tensor, Tensor]:
        """Hidden and cell state, zeros, `[B, layers, H]` each."""
        weight = next(self.lstm.parameters())
        zeros = weight.new_zeros(batch, self.lstm.num_layers, self.lstm.hidden_size)
        return zeros, zeros

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        """`[B, C, t]` to `[B, C, t]`."""
        if not x.shape[-1]:
            return state, x
        memory = tuple(each.transpose(0, 1).contiguous() for each in state)
        out, memory = self.lstm(x.permute(2, 0, 1), memory)
        return tuple(each.transpose(0, 1) for each in memory), out.permute(1, 2, 0) + x

    def finish(self, state: Any) -> Tensor | None:
        """Nothing."""
        return None

    def count(self, n: int) -> int:
        """One for one."""
        return n


class Chain:
    """One layer behind the other."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = tuple(layers)
        self.in_step = all(layer.in_step for layer in self.layers)

    def start(self, batch: int) -> tuple[Any, ...]:
        """A state for each layer."""
        return tuple(layer.start(batch) for layer in self.layers)

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        """`[B, C, t]` through all layers."""
        states = []
        for layer, before in zip(self.layers, state, strict=True):
            after, x = layer.step(before, x)
            states.append(after)
        return tuple(states), x

    def finish(self, state: Any) -> Tensor | None:
        """What each layer lets go at the end passes through those behind it."""
        out: Tensor | None = None
        for layer, own in zip(self.layers, state, strict=True):
            head = None
            if out is not None:
                own, head = layer.step(own, out)
            out = join(head, layer.finish(own))
        return out

    def count(self, n: int) -> int:
        """Outputs of the last layer after `n` inputs of the first."""
        for layer in self.layers:
            n = layer.count(n)
        return n


class Waiting(NamedTuple):
    """What some branches of a sum have given before the others."""

    states: tuple[Any, ...]
    ahead: tuple[Tensor | None, ...]  # [B, C, t] each, one of them empty


class Residual:
    """Branches of one input, added: where one looks ahead, the others wait for it."""

    def __init__(self, *branches: Layer) -> None:
        self.branches = branches
        self.in_step = all(branch.in_step for branch in branches)

    def start(self, batch: int) -> Waiting:
        """All branches at their start."""
        states = tuple(branch.start(batch) for branch in self.branches)
        return Waiting(states, (None,) * len(states))

    def step(self, state: Waiting, x: Tensor) -> tuple[Waiting, Tensor]:
        """`[B, C, t]` to the sum, as far as all branches have come."""
        pairs = [each.step(own, x) for each, own in zip(self.branches, state.states, strict=True)]
        states = tuple(pair[0] for pair in pairs)
        if self.in_step:
            return Waiting(states, state.ahead), _sum([pair[1] for pair in pairs])
        outs = [
            torch.cat([*_some(old), new], -1)
            for old, (_, new) in zip(state.ahead, pairs, strict=True)
        ]
        n = min(out.shape[-1] for out in outs)
        ahead = tuple(out[..., n:] for out in outs)
        return Waiting(states, ahead), _sum([out[..., :n] for out in outs])

    def finish(self, state: Waiting) -> Tensor | None:
        """The rest of all of them, added."""
        ends = [each.finish(own) for each, own in zip(self.branches, state.states, strict=True)]
        outs = [join(old, new) for old, new in zip(state.ahead, ends, strict=True)]
        rest = [out for out in outs if out is not None]
        if len(rest) < len(outs):
            return None
        n = min(out.shape[-1] for out in rest)
        return _sum([out[..., :n] for out in rest])

    def count(self, n: int) -> int:
        """As many as the slowest branch gives."""
        return min(branch.count(n) for branch in self.branches)


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _some(x: Tensor | None) -> list[Tensor]:
    return [] if x is None else [x]


def join(head: Tensor | None, tail: Tensor | None) -> Tensor | None:
    """One behind the other along time, either of which may not be there."""
    if head is None or tail is None:
        return tail if head is None else head
    return torch.cat([head, tail], dim=-1)
