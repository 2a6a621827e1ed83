"""Codes to pitch and envelopes: a small causal convolutional network that may see one frame ahead.

Ten milliseconds of sound get a pitch and two envelopes. It runs in float64 in the decoder, since
a phase adds up what pitch is wrong by; training is free to use float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.frontends.codecs.embedded_features import PITCH, STEPS, WIDTH
from mmfast.frontends.codecs.embedded_synthesis import POINTS

LOOKAHEAD = 1  # frames
_SCALE = 30.0  # of features, so that the first layer sees about 1
_LOWEST, _HIGHEST = -0.7, 1.4  # log of pitch over 110 Hz: 55 to 446 Hz
_LEVEL = -4.0  # log magnitude where the last layer starts


class CausalBlock(nn.Module):
    """A causal convolution and a pointwise layer, added to what came in."""

    def __init__(self, width: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.past = (kernel - 1) * dilation
        self.across = nn.Conv1d(width, width, kernel, dilation=dilation)
        self.point = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, W, T]` and the `[B, W, past]` before it; gives both, one piece further on."""
        seen = torch.cat([tail, x], 2)
        y = self.point(F.gelu(self.across(seen)))
        return x + y, seen[:, :, seen.shape[2] - self.past :]


class VocoderNet(nn.Module):
    """Features of frames to pitch and envelopes of hops.

    Args:
        width: Of layers at 25 frames per second.
        fine: Of layers at 100 hops per second.
    """

    def __init__(self, width: int = 160, fine: int = 96) -> None:
        super().__init__()
        self.enter = nn.Conv1d(WIDTH, width, 1)
        self.frames = nn.ModuleList(CausalBlock(width, 3, d) for d in (1, 1, 2, 4))
        self.up = nn.Conv1d(width, fine * STEPS, 1)
        self.hops = nn.ModuleList(CausalBlock(fine, 5) for _ in range(2))
        self.leave = nn.Conv1d(fine, 1 + POINTS, 1)

    def tails(self, batch: int) -> list[Tensor]:
        """What layers remember before the first frame."""
        weight = self.enter.weight
        sizes = [
            (block.across.in_channels, block.past)
            for block in (*self.frames, *self.hops)
            if isinstance(block, CausalBlock)
        ]
        return [weight.new_zeros(batch, width, past) for width, past in sizes]

    def forward(
        self, frames: Tensor, tails: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Frames behind those before.

        Args:
            frames: Features, as codes give them `[B, T, 100]`.
            tails: What layers remember; nothing at the start.

        Returns:
            Hz `[B, 4 T]` and log magnitudes `[B, 4 T, 96]` of the frames one earlier, and what
            layers remember now.
        """
        left = list(self.tails(len(frames)) if tails is None else tails)
        kept: list[Tensor] = []
        x = self.enter(frames.mT / _SCALE)
        for block in self.frames:
            x, tail = block(x, left.pop(0))
            kept.append(tail)
        batch, _, count = x.shape
        x = self.up(F.gelu(x)).view(batch, -1, STEPS, count).mT.reshape(batch, -1, count * STEPS)
        for block in self.hops:
            x, tail = block(x, left.pop(0))
            kept.append(tail)
        out = self.leave(F.gelu(x)).mT  # [B, 4 T, 97]
        pitch = PITCH * (out[..., 0]).clamp(_LOWEST, _HIGHEST).exp()
        return pitch, out[..., 1:] + _LEVEL, kept
