"""Convolutions on a stream: left context kept, look-ahead waited for, overlaps carried.

A causal convolution of effective kernel k and stride s needs the k - s inputs before a chunk; the k
- s last outputs of a transposed one are not certain until the next chunk has been added, and the
bias belongs to them once. Both ends of a stream are padded as the offline layer does.
"""

# ruff: noqa: D102 (`CodecLayer` documents the methods of its kinds)
from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from mmfast.core.errors import ModelError
from mmfast.frontends.codecs.layers import CodecLayer

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
