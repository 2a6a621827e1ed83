"""Features of the embedded codec for 40 ms of sound, and the network that decodes them.

Features are spectral envelope, pitch and voicing. The envelope is four log-mel frames, as the first
cosine coefficients over mel bins and over time, which removes the single harmonics of a voice.
Pitch is a normalised cross-correlation (D. Talkin, "A robust algorithm for pitch tracking", 1995)
without its search over time, which could not stream. All in float64: the nearest entry of a
codebook must not depend on the split of the sound. `VocoderNet`, a small causal convolutional
network with one frame of look-ahead, gives every 10 ms a pitch and two envelopes. It runs in
float64 in the decoder, since errors of pitch add up in the phase; training may use float32.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from mmfast.frontends.codecs.embedded.synthesis import POINTS
from mmfast.ops.audio import BINS, HOP, RATE, log_mel

FRAME = 640  # samples: 25 frames per second
STEPS = FRAME // HOP  # mel frames in one frame
PAST = 480  # samples before a frame that its features depend on
COEFFICIENTS = 24  # of the envelope
WIDTH = COEFFICIENTS * STEPS + 4  # and pitch and voicing of both halves
PITCH = 110.0  # Hz where the pitch feature is 0
QUIET = -7.0  # log-mel below this is silence: 60 dB under speech
PITCH_WEIGHT, VOICED_WEIGHT = 100.0, 10.0
_SPAN, _SHORT, _LONG = PAST + HOP, 32, 267  # samples of a pitch window; lags: 500 Hz to 60 Hz
_FAINT = 1.4e-5  # squared energy of a pitch window that counts as silence
_NEAR = 0.88  # the shortest lag this close to the best one is the period, not a multiple


@cache
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _cosines(size: int, count: int) -> Tensor:
    """Orthonormal cosine transform `[count, size]`, float64."""
    spots = (torch.arange(size, dtype=torch.float64) + 0.5) * math.pi / size
    table = torch.cos(spots * torch.arange(count, dtype=torch.float64)[:, None])
    table *= math.sqrt(2.0 / size)
    table[0] /= math.sqrt(2.0)
    return table


def pitch_track(heard: Tensor) -> tuple[Tensor, Tensor]:
    """Pitch in Hz `[B, t]` every 10 ms, and its correlation with the period before, 0 to 1.

    From `[B, 480 + 160 t]` float64, the 480 samples before it in front.
    """
    windows = heard.unfold(-1, _SPAN, HOP)  # [B, t, 640]
    windows = windows - windows.mean(-1, keepdim=True)
    length = _SPAN - _LONG
    size = 1024  # at least _SPAN + length, so that nothing wraps round
    spectrum = torch.fft.rfft(windows, size)
    first = torch.fft.rfft(windows[..., :length], size)
    cross = torch.fft.irfft(spectrum * first.conj(), size)[..., _SHORT - 1 : _LONG + 1]
    sums = F.pad(windows.square().cumsum(-1), (1, 0))
    energy = sums[..., length : length + _LONG + 1] - sums[..., : _LONG + 1]
    norm = (energy[..., :1] * energy[..., _SHORT - 1 :] + _FAINT).clamp(min=_FAINT).sqrt()
    like = cross / norm  # [B, t, lags]
    before, middle, after = like[..., :-2], like[..., 1:-1], like[..., 2:]
    peaks = torch.where((middle >= before) & (middle > after), middle, -1.0)
    best = peaks.amax(-1, keepdim=True)
    at = (peaks >= _NEAR * best).to(torch.uint8).argmax(-1, keepdim=True)  # the first one
    low, high, over = (like.gather(-1, at + side) for side in (0, 1, 2))
    shift = (0.5 * (low - over) / (low - 2 * high + over - 1e-12)).clamp(-0.5, 0.5)
    return (RATE / (at + _SHORT + shift))[..., 0], high[..., 0].clamp(0.0, 1.0)


def voicing(strength: Tensor) -> Tensor:
    """Map a correlation to a share of voice, 0 to 1."""
    return ((strength - 0.55) / 0.25).clamp(0.0, 1.0)


def features(heard: Tensor) -> Tensor:
    """Features `[B, T, 100]` of `[B, 480 + 640 T]`, 480 earlier ones in front; silence is zeros."""
    mel = log_mel(heard)[:, PAST // HOP :].clamp(min=QUIET) - QUIET  # [B, 4 T, 80]
    mel = rearrange(mel, "b (t s) m -> b t s m", s=STEPS)
    shape = torch.einsum(
        "ij,btjm,km->btik", _cosines(STEPS, STEPS), mel, _cosines(BINS, COEFFICIENTS)
    )
    hertz, strength = (
        rearrange(each, "b (t half s) -> b t half s", half=2, s=STEPS // 2)
        for each in pitch_track(heard)
    )
    share = voicing(strength)
    tone = ((hertz / PITCH).log() * share).sum(-1)
    tone = tone / share.sum(-1).clamp(min=1e-3)  # mean over what is voiced
    share = share.mean(-1)
    return torch.cat([shape.flatten(2), PITCH_WEIGHT * tone * share, VOICED_WEIGHT * share], -1)


LOOKAHEAD = 1  # frames
_SCALE = 30.0  # of features, so that the first layer sees about 1
_LOWEST, _HIGHEST = -0.7, 1.4  # log of pitch over 110 Hz: 55 to 446 Hz
_LEVEL = -4.0  # log magnitude where the last layer starts


class CausalBlock(nn.Module):
    """A causal convolution (one product: ten times faster) and a pointwise layer, both residual."""

    def __init__(self, width: int, kernel: int, dilation: int = 1) -> None:
        super().__init__()
        self.width, self.kernel, self.dilation = width, kernel, dilation
        self.past = (kernel - 1) * dilation
        self.across = nn.Linear(width * kernel, width)
        self.point = nn.Linear(width, width)

    def forward(self, x: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
        """Run `[B, T, W]` after the past `[B, past, W]`; return the output and the new past."""
        count = x.shape[1]
        seen = torch.cat([tail, x], 1)
        taps = [seen[:, i * self.dilation :][:, :count] for i in range(self.kernel)]
        y: Tensor = self.point(F.gelu(self.across(torch.cat(taps, 2))))
        return x + y, seen[:, count:]


class VocoderNet(nn.Module):
    """Features of frames to pitch and envelopes of hops, in layers of `width` and `fine`."""

    def __init__(self, width: int = 160, fine: int = 96) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, width)
        self.up = nn.Linear(width, fine * STEPS)
        self.leave = nn.Linear(fine, 1 + POINTS)
        self.frames = nn.ModuleList(CausalBlock(width, 3, d) for d in (1, 1, 2, 4))
        self.hops = nn.ModuleList(CausalBlock(fine, 5) for _ in range(2))

    def tails(self, batch: int) -> list[Tensor]:
        """Return the past of each layer before the first frame, `[B, past, W]` each."""
        blocks = [each for each in (*self.frames, *self.hops) if isinstance(each, CausalBlock)]
        like = self.enter.weight
        return [like.new_zeros(batch, block.past, block.width) for block in blocks]

    def forward(
        self, frames: Tensor, tails: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Hz `[B, 4 T]` and log magnitudes `[B, 4 T, 96]`, one frame late, and new tails."""
        left = list(self.tails(len(frames)) if tails is None else tails)
        kept: list[Tensor] = []
        x = self.enter(frames / _SCALE)
        for block in self.frames:
            x, tail = block(x, left.pop(0))
            kept.append(tail)
        x = rearrange(self.up(F.gelu(x)), "b t (s f) -> b (t s) f", s=STEPS)
        for block in self.hops:
            x, tail = block(x, left.pop(0))
            kept.append(tail)
        out = self.leave(F.gelu(x))  # [B, 4 T, 97]
        pitch = PITCH * out[..., 0].clamp(_LOWEST, _HIGHEST).exp()
        return pitch, out[..., 1:] + _LEVEL, kept
