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
    """A causal convolution and a pointwise layer, added to what came in.

    The convolution is one product with what its taps see, side by side: for a frame at a time in
    float64 that is ten times faster than the library's own.
    """

    def __init__(self, width: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.width, self.kernel, self.dilation = width, kernel, dilation
        self.past = (kernel - 1) * dilation
        self.across = nn.Linear(width * kernel, width)
        self.point = nn.Linear(width, width)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, W]` and the `[B, past, W]` before it; gives both, one piece further on."""
        count = x.shape[1]
        seen = torch.cat([tail, x], 1)
        taps = [seen[:, i * self.dilation :][:, :count] for i in range(self.kernel)]
        y: Tensor = self.point(F.gelu(self.across(torch.cat(taps, 2))))
        return x + y, seen[:, count:]


class VocoderNet(nn.Module):
    """Features of frames to pitch and envelopes of hops.

    Args:
        width: Of layers at 25 frames per second.
        fine: Of layers at 100 hops per second.
    """

    def __init__(self, width: int = 160, fine: int = 96) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, width)
        self.up = nn.Linear(width, fine * STEPS)
        self.leave = nn.Linear(fine, 1 + POINTS)
        self.frames = nn.ModuleList(CausalBlock(width, 3, d) for d in (1, 1, 2, 4))
        self.hops = nn.ModuleList(CausalBlock(fine, 5) for _ in range(2))

    def tails(self, batch: int) -> list[Tensor]:
        """What layers remember before the first frame, `[B, past, W]` each."""
        blocks = [each for each in (*self.frames, *self.hops) if isinstance(each, CausalBlock)]
        like = self.enter.weight
        return [like.new_zeros(batch, block.past, block.width) for block in blocks]

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
        x = self.enter(frames / _SCALE)
        for block in self.frames:
            x, tail = block(x, left.pop(0))
            kept.append(tail)
        batch, count, _ = x.shape
        x = self.up(F.gelu(x)).reshape(batch, count * STEPS, -1)
        for block in self.hops:
            x, tail = block(x, left.pop(0))
            kept.append(tail)
        out = self.leave(F.gelu(x))  # [B, 4 T, 97]
        pitch = PITCH * out[..., 0].clamp(_LOWEST, _HIGHEST).exp()
        return pitch, out[..., 1:] + _LEVEL, kept
