"""Layers that need more future than there is time for: each frame from a window around it.

The window of frame t ends `ahead` frames behind it, and what lies beyond is taken for the end of
the sound. It is exact where the window covers all that the layers can see of the future; short of
that its error is there to be measured (`deviation`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mmfast.frontends.codecs.layers import Layer


class Seen(NamedTuple):
    """The frames that a window may still need."""

    frames: Tensor  # [B, C, w * unit]
    done: int  # frames given
    total: int  # frames come


class Windowed:
    """Layers, run anew over `back` frames, the frame itself and `ahead` frames.

    Args:
        layers: What is to run; in one piece on every window.
        channels: Channels of its input.
        unit: Inputs per frame.
        yields: Outputs per frame.
        back: Frames before; the layers' own past, or more.
        ahead: Frames behind.
        like: A tensor of the input's type and place.
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

    def start(self, batch: int) -> Seen:
        """No frame yet."""
        return Seen(self.like.new_zeros(batch, self.channels, 0), 0, 0)

    def step(self, state: Seen, x: Tensor) -> tuple[Seen, Tensor]:
        """Whole frames `[B, C, t * unit]` to the frames whose window is full."""
        frames = torch.cat([state.frames, x], -1)
        total = state.total + x.shape[-1] // self.unit
        state = Seen(frames, state.done, total)
        return self._give(state, max(state.done, total - self.ahead))

    def finish(self, state: Seen) -> Tensor | None:
        """The last frames, whose windows end with the stream."""
        return self._give(state, state.total)[1] if state.total > state.done else None

    def count(self, n: int) -> int:
        """Outputs after `n` inputs."""
        return max(0, n // self.unit - self.ahead) * self.yields

    def _give(self, state: Seen, until: int) -> tuple[Seen, Tensor]:
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
        return Seen(kept, until, state.total), torch.cat(outs, -1) if outs else empty


def at_once(layers: Layer) -> Callable[[Tensor], Tensor]:
    """Layers over a whole window: from its start to its end."""

    def whole(x: Tensor) -> Tensor:
        state, out = layers.step(layers.start(x.shape[0]), x)
        tail = layers.finish(state)
        return out if tail is None else torch.cat([out, tail], -1)

    return whole


def deviation(exact: Tensor, other: Tensor) -> tuple[float, float]:
    """How far one sound is from another: largest difference, and error to signal in decibels."""
    error = other.double() - exact.double()
    power = float(exact.double().pow(2).mean().clamp(min=1e-30))
    noise = float(error.pow(2).mean().clamp(min=1e-30))
    return float(error.abs().max()), 10 * math.log10(noise / power)
