"""Layers that work on a stream: the state that each one keeps is a value, handed in and out.

All of them take and give `[B, C, t]`, for any t including 0. A layer is in step when t inputs give
exactly t * up / down outputs at once: then a row of a batch can begin anew while the others go on.
Other layers wait, for the first samples (reflection) or for later ones (look-ahead). Layers whose
look-ahead is longer than the latency allows run on a window around each frame (`Windowed`).

Convolutions keep their left context, wait for their look-ahead and carry overlaps. A causal
convolution of effective kernel k and stride s needs the k - s inputs before a chunk; the k - s last
outputs of a transposed one are not certain until the next chunk has been added, and the bias
belongs to them once. Both ends of a stream are padded as the offline layer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mmfast.core.errors import ModelError
from mmfast.ops.similarity import sum_of

# ruff: noqa: D102 (`CodecLayer` documents the methods of its kinds)


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


MODES = ("constant", "replicate", "reflect")


class Past(NamedTuple):
    """State of a convolution."""

    context: Tensor  # [B, C, c] inputs and padding that later outputs need
    recent: Tensor  # [B, C, <= r] the last inputs, for the padding at the end
    fresh: Tensor  # [B] rows that have had no input yet
    total: int  # inputs so far


class Conv(CodecLayer):
    """A convolution with its own padding, if `whole` up to a multiple of the stride."""

    def __init__(
        self, conv: Any, left: int, right: int, mode: str = "constant", whole: bool = False
    ) -> None:
        if mode not in MODES:
            raise ModelError(f"cannot stream padding {mode!r}; choices: {', '.join(MODES)}")
        self.weight, self.bias = conv.weight.detach(), conv.bias
        self.stride, self.dilation = int(conv.stride[0]), int(conv.dilation[0])
        self.kernel, self.groups = (int(conv.kernel_size[0]) - 1) * self.dilation + 1, conv.groups
        self.left, self.right, self.mode, self.whole = left, right, mode, whole
        mirrored = mode == "reflect" and bool(left or right or (whole and self.stride > 1))
        self.keep = max(left, right + self.stride) + 1 if mirrored else int(mode == "replicate")
        self.in_step = left == self.kernel - self.stride and not mirrored

    def start(self, batch: int) -> Past:
        """Return zeros where they are the padding; other padding waits for the first inputs."""
        channels, mirrored = self.weight.shape[1] * self.groups, self.mode == "reflect"
        context = self.weight.new_zeros(batch, channels, 0 if mirrored else self.left)
        recent = self.weight.new_zeros(batch, channels, 0 if mirrored else self.keep)
        fresh = torch.ones(batch, dtype=torch.bool, device=self.weight.device)
        return Past(context, recent, fresh, 0)

    def step(self, state: Past, x: Tensor) -> tuple[Past, Tensor]:
        total = state.total + x.shape[-1]
        recent = state.recent
        if self.keep:
            recent = torch.cat([recent, x], -1)[..., -self.keep :]
        context = torch.cat([self._begin(state, x), x], -1)
        if self.mode == "reflect" and self.left and state.total <= self.left:
            if total <= self.left:
                return Past(context, recent, state.fresh, total), self._none(x)
            context = pad(context, self.left, 0, self.mode)
        n = max(0, (context.shape[-1] - self.kernel) // self.stride + 1)
        fresh = state.fresh if not x.shape[-1] else torch.zeros_like(state.fresh)
        out = self._run(context) if n else self._none(x)
        return Past(context[..., n * self.stride :], recent, fresh, total), out

    def finish(self, state: Past) -> Tensor | None:
        extra = -state.total % self.stride if self.whole else 0
        if not state.total or not self.right + extra:
            return self._unbegun(state, 0)
        if self._waits(state):
            return self._unbegun(state, self.right + extra)
        if self.mode == "constant":
            context = functional.pad(state.context, (0, self.right + extra))
        else:
            padded = pad(state.recent, self.left, self.right + extra, self.mode)
            tail = padded[..., self.left + state.recent.shape[-1] :]
            context = torch.cat([state.context, tail], -1)
        return self._run(context) if context.shape[-1] >= self.kernel else None

    def count(self, n: int) -> int:
        if self.mode == "reflect" and self.left and n <= self.left:
            return 0
        return max(0, (n + self.left - self.kernel) // self.stride + 1)

    def _begin(self, state: Past, x: Tensor) -> Tensor:
        """Return the context; a row without input so far gets copies of its first one."""
        if self.mode != "replicate" or not self.left or not x.shape[-1]:
            return state.context
        copies = x[..., :1].expand(*x.shape[:2], state.context.shape[-1])
        return torch.where(state.fresh[:, None, None], copies, state.context)

    def _waits(self, state: Past) -> bool:
        return self.mode == "reflect" and self.left > 0 and state.total <= self.left

    def _unbegun(self, state: Past, right: int) -> Tensor | None:
        """Run a stream that ended before it was long enough to be mirrored."""
        if not state.total or not self._waits(state):
            return None
        return self._run(pad(state.context, self.left, right, self.mode))

    def _run(self, x: Tensor) -> Tensor:
        return functional.conv1d(
            x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups
        )

    def _none(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[0], self.weight.shape[0], 0)


class Overlap(NamedTuple):
    """State of a transposed convolution."""

    tail: Tensor  # [B, C, k - s] sums that later inputs add to, without bias
    total: int  # inputs so far


class ConvTranspose(CodecLayer):
    """A transposed convolution with `left` and `right` samples of its output cut off."""

    def __init__(self, conv: Any, left: int, right: int) -> None:
        self.kernel, self.stride = int(conv.kernel_size[0]), int(conv.stride[0])
        if conv.dilation[0] != 1 or self.kernel < self.stride:
            raise ModelError(
                f"cannot stream a transposed convolution of kernel {self.kernel}, stride "
                f"{self.stride}, dilation {conv.dilation[0]}; kernel >= stride, dilation 1"
            )
        self.weight, self.bias, self.groups = conv.weight.detach(), conv.bias, conv.groups
        self.left, self.right = left, right
        self.channels = self.weight.shape[1] * self.groups
        self.in_step = left == 0

    def start(self, batch: int) -> Overlap:
        tail = self.weight.new_zeros(batch, self.channels, self.kernel - self.stride)
        return Overlap(tail, 0)

    def step(self, state: Overlap, x: Tensor) -> tuple[Overlap, Tensor]:
        """Run `[B, C, t]` to the t * stride samples that no later input changes."""
        n, over = x.shape[-1], self.kernel - self.stride
        if not n:
            return state, x.new_zeros(x.shape[0], self.channels, 0)
        spread = functional.conv_transpose1d(x, self.weight, None, self.stride, groups=self.groups)
        if over:
            spread[..., :over] += state.tail
        out, tail = spread[..., : n * self.stride], spread[..., n * self.stride :]
        cut = max(0, min(self.left - state.total * self.stride, out.shape[-1]))
        return Overlap(tail, state.total + n), self._biased(out[..., cut:])

    def finish(self, state: Overlap) -> Tensor | None:
        stop = self.kernel - self.stride - self.right
        cut = max(0, self.left - state.total * self.stride)
        return self._biased(state.tail[..., cut:stop]) if state.total and stop > cut else None

    def count(self, n: int) -> int:
        return max(0, n * self.stride - self.left)

    def _biased(self, x: Tensor) -> Tensor:
        return x if self.bias is None else x + self.bias[:, None]


def pad(x: Tensor, left: int, right: int, mode: str) -> Tensor:
    """Pad both ends; a mirror longer than the stream reads zeros after its end."""
    if mode != "reflect":
        return functional.pad(x, (left, right), mode)
    short = max(0, max(left, right) - x.shape[-1] + 1)
    padded = functional.pad(functional.pad(x, (0, short)), (left, right), mode)
    return padded[..., : padded.shape[-1] - short]
