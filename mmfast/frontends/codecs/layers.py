"""Layers that work on a stream: the state that each one keeps is a value, handed in and out.

All of them take and give `[B, C, t]`, for any t including 0. A layer is in step when t inputs give
exactly t * up / down outputs at once: then a row of a batch can begin anew while the others go on.
Other layers wait, for the first samples (reflection) or for later ones (look-ahead). Layers whose
look-ahead is longer than the latency allows run on a window around each frame (`Windowed`).
"""

# ruff: noqa: D102 (`CodecLayer` documents the methods of its kinds)
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.ops.similarity import sum_of


class CodecLayer:
    """One layer or a stack of them; the defaults are those of a stateless layer, one for one."""

    in_step = True

    def start(self, batch: int) -> Any:
        """Return the state of `batch` streams before their first sample."""
        return ()

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        """Return the next state and the outputs that inputs `[B, C, t]` make certain."""
        raise NotImplementedError

    def finish(self, state: Any) -> Tensor | None:
        """Return the outputs left at the end, if any; else None."""
        return None

    def count(self, n: int) -> int:
        """Return the number of outputs that are certain after `n` inputs."""
        return n


class Pointwise(CodecLayer):
    """A function of each moment alone, `[B, …, t]` to `[B, *shape, t]`: activations, tables."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.function, self.shape, self.dtype = function, shape, dtype

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        if x.shape[-1]:
            return state, self.function(x)
        shape = x.shape[1:-1] if self.shape is None else self.shape
        return state, x.new_zeros(x.shape[0], *shape, 0, dtype=self.dtype)


class Recurrent(CodecLayer):
    """An LSTM beside a skip connection, as in EnCodec: y = lstm(x) + x."""

    def __init__(self, lstm: nn.LSTM) -> None:
        if lstm.bidirectional or lstm.batch_first or lstm.proj_size:
            raise ModelError("cannot stream this LSTM; give one that goes forward, time first")
        self.lstm = lstm

    def start(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return zeros as hidden and cell state, `[B, layers, H]` each."""
        weight = next(self.lstm.parameters())
        zeros = weight.new_zeros(batch, self.lstm.num_layers, self.lstm.hidden_size)
        return zeros, zeros

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        if not x.shape[-1]:
            return state, x
        memory = tuple(each.transpose(0, 1).contiguous() for each in state)
        out, memory = self.lstm(x.permute(2, 0, 1), memory)
        return tuple(each.transpose(0, 1) for each in memory), out.permute(1, 2, 0) + x


class LayerChain(CodecLayer):
    """Layers that run one after the other."""

    def __init__(self, layers: Sequence[CodecLayer]) -> None:
        self.layers = tuple(layers)
        self.in_step = all(layer.in_step for layer in self.layers)

    def start(self, batch: int) -> tuple[Any, ...]:
        return tuple(layer.start(batch) for layer in self.layers)

    def step(self, state: Any, x: Tensor) -> tuple[Any, Tensor]:
        states = []
        for layer, before in zip(self.layers, state, strict=True):
            after, x = layer.step(before, x)
            states.append(after)
        return tuple(states), x

    def finish(self, state: Any) -> Tensor | None:
        out: Tensor | None = None
        for layer, own in zip(self.layers, state, strict=True):
            head = None
            if out is not None:
                own, head = layer.step(own, out)
            out = join(head, layer.finish(own))
        return out

    def count(self, n: int) -> int:
        for layer in self.layers:
            n = layer.count(n)
        return n


class BranchBuffer(NamedTuple):
    """Outputs that some branches of a sum gave before the others."""

    states: tuple[Any, ...]
    ahead: tuple[Tensor | None, ...]  # [B, C, t] each, one of them empty


class Residual(CodecLayer):
    """The sum of branches of one input; where one looks ahead, the others wait for it."""

    def __init__(self, *branches: CodecLayer) -> None:
        self.branches = branches
        self.in_step = all(branch.in_step for branch in branches)

    def start(self, batch: int) -> BranchBuffer:
        states = tuple(branch.start(batch) for branch in self.branches)
        return BranchBuffer(states, (None,) * len(states))

    def step(self, state: BranchBuffer, x: Tensor) -> tuple[BranchBuffer, Tensor]:
        pairs = [each.step(own, x) for each, own in zip(self.branches, state.states, strict=True)]
        states = tuple(pair[0] for pair in pairs)
        if self.in_step:
            return BranchBuffer(states, state.ahead), sum_of([pair[1] for pair in pairs])
        outs = [
            new if old is None else torch.cat([old, new], -1)
            for old, (_, new) in zip(state.ahead, pairs, strict=True)
        ]
        n = min(out.shape[-1] for out in outs)
        ahead = tuple(out[..., n:] for out in outs)
        return BranchBuffer(states, ahead), sum_of([out[..., :n] for out in outs])

    def finish(self, state: BranchBuffer) -> Tensor | None:
        ends = [each.finish(own) for each, own in zip(self.branches, state.states, strict=True)]
        outs = [join(old, new) for old, new in zip(state.ahead, ends, strict=True)]
        rest = [out for out in outs if out is not None]
        if len(rest) < len(outs):
            return None
        n = min(out.shape[-1] for out in rest)
        return sum_of([out[..., :n] for out in rest])

    def count(self, n: int) -> int:
        return min(branch.count(n) for branch in self.branches)


def join(head: Tensor | None, tail: Tensor | None) -> Tensor | None:
    """Concatenate along time; either part may be missing."""
    if head is None or tail is None:
        return tail if head is None else head
    return torch.cat([head, tail], dim=-1)


class Edge(CodecLayer):
    """Padding with `left` copies of the first sample and `right` of the last one, `[B, C, 1]`."""

    in_step = False

    def __init__(self, left: int, right: int) -> None:
        self.left, self.right = left, right

    def start(self, batch: int) -> None:
        """Return the state before the first sample."""

    def step(self, state: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return `[B, C, t]`, with copies before the first sample."""
        if not x.shape[-1]:
            return state, x
        copies = x[..., :1].expand(*x.shape[:2], self.left)
        return x[..., -1:].clone(), torch.cat([copies, x], -1) if state is None else x

    def finish(self, state: Tensor | None) -> Tensor | None:
        return None if state is None else state.expand(*state.shape[:2], self.right)

    def count(self, n: int) -> int:
        return n + self.left if n else 0


class Due(NamedTuple):
    """Numbers of inputs and outputs so far."""

    inner: Any
    total: int
    given: int


class Capped(CodecLayer):
    """A layer whose total output is cut to `ratio` times its input."""

    def __init__(self, layer: CodecLayer, ratio: int) -> None:
        self.layer, self.ratio, self.in_step = layer, ratio, layer.in_step

    def start(self, batch: int) -> Due:
        return Due(self.layer.start(batch), 0, 0)

    def step(self, state: Due, x: Tensor) -> tuple[Due, Tensor]:
        inner, out = self.layer.step(state.inner, x)
        return Due(inner, state.total + x.shape[-1], state.given + out.shape[-1]), out

    def finish(self, state: Due) -> Tensor | None:
        tail = join(None, self.layer.finish(state.inner))
        return None if tail is None else tail[..., : self.ratio * state.total - state.given]

    def count(self, n: int) -> int:
        return self.layer.count(n)


class FrameWindow(NamedTuple):
    """Frames that a window may still need."""

    frames: Tensor  # [B, C, w * unit]
    done: int  # frames given
    total: int  # frames come


class Windowed(CodecLayer):
    """Layers run anew on each frame with `back` frames before it and `ahead` frames after it.

    A frame is `unit` inputs of `channels` channels, of the type of `like`, and `yields` outputs.
    """

    in_step = False

    def __init__(
        self,
        layers: Callable[[Tensor], Tensor],
        channels: int,
        unit: int,
        yields: int,
        back: int,
        ahead: int,
        like: Tensor,
    ) -> None:
        self.layers, self.channels, self.unit, self.yields = layers, channels, unit, yields
        self.back, self.ahead, self.like = back, ahead, like

    def start(self, batch: int) -> FrameWindow:
        return FrameWindow(self.like.new_zeros(batch, self.channels, 0), 0, 0)

    def step(self, state: FrameWindow, x: Tensor) -> tuple[FrameWindow, Tensor]:
        frames = torch.cat([state.frames, x], -1)
        total = state.total + x.shape[-1] // self.unit
        state = FrameWindow(frames, state.done, total)
        return self._give(state, max(state.done, total - self.ahead))

    def finish(self, state: FrameWindow) -> Tensor | None:
        return self._give(state, state.total)[1] if state.total > state.done else None

    def count(self, n: int) -> int:
        return max(0, n // self.unit - self.ahead) * self.yields

    def _give(self, state: FrameWindow, until: int) -> tuple[FrameWindow, Tensor]:
        base = state.total - state.frames.shape[-1] // self.unit  # the first frame kept
        outs = []
        for t in range(state.done, until):
            low, high = max(base, t - self.back), min(state.total, t + self.ahead + 1)
            out = self.layers(
                state.frames[..., (low - base) * self.unit : (high - base) * self.unit]
            )
            outs.append(out[..., (t - low) * self.yields : (t - low + 1) * self.yields])
        first = max(base, until - self.back)
        kept = state.frames[..., (first - base) * self.unit :].clone()
        empty = self.like.new_zeros(state.frames.shape[0], 1, 0)
        return FrameWindow(kept, until, state.total), torch.cat(outs, -1) if outs else empty


def at_once(layers: CodecLayer) -> Callable[[Tensor], Tensor]:
    """Return a function that runs layers over a whole window, from its start to its end."""

    def whole(x: Tensor) -> Tensor:
        state, out = layers.step(layers.start(x.shape[0]), x)
        tail = layers.finish(state)
        return out if tail is None else torch.cat([out, tail], -1)

    return whole
