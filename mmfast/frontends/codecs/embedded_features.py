"""What the embedded codec keeps of 40 ms of sound: spectral envelope, pitch, voicing.

Envelope: four log-mel frames, as the first cosine coefficients over mel bins and over time, so
that the single harmonics of a voice fall away. Pitch: a normalised cross-correlation (D. Talkin,
"A robust algorithm for pitch tracking", 1995) without its search over time, which could not
stream. All in float64: the nearest entry of a codebook must not depend on how sound was split.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.ops.log_mel import BINS, HOP, RATE, log_mel

FRAME = 640  # samples: 25 frames per second
STEPS = FRAME // HOP  # mel frames in one frame
PAST = 480  # samples before a frame that are looked at
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
    """Pitch and how periodic sound is, 100 times a second.

    Args:
        heard: `[B, 480 + 160 t]` float64, the 480 samples before it in front.

    Returns:
        Hz `[B, t]`, and the correlation with the period before `[B, t]`, 0 to 1.
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
    """Correlation to a share of voice, 0 to 1."""
    return ((strength - 0.55) / 0.25).clamp(0.0, 1.0)


def features(heard: Tensor) -> Tensor:
    """Features of whole frames of sound.

    Args:
        heard: `[B, 480 + 640 T]` float64, the 480 samples before it in front.

    Returns:
        `[B, T, 100]` float64; silence is all zeros.
    """
    mel = log_mel(heard)[:, PAST // HOP :].clamp(min=QUIET) - QUIET  # [B, 4 T, 80]
    mel = mel.unflatten(1, (-1, STEPS))
    shape = torch.einsum(
        "ij,btjm,km->btik", _cosines(STEPS, STEPS), mel, _cosines(BINS, COEFFICIENTS)
    )
    hertz, strength = pitch_track(heard)
    share = voicing(strength).unflatten(1, (-1, 2, STEPS // 2))  # [B, T, 2, 2]
    tone = ((hertz / PITCH).log().unflatten(1, (-1, 2, STEPS // 2)) * share).sum(-1)
    tone = tone / share.sum(-1).clamp(min=1e-3)  # mean over what is voiced
    share = share.mean(-1)
    return torch.cat([shape.flatten(2), PITCH_WEIGHT * tone * share, VOICED_WEIGHT * share], -1)
