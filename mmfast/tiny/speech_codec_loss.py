"""How far sound is from sound, to an ear: short-time spectra at several resolutions."""

from __future__ import annotations

import torch
from torch import Tensor

SIZES = (256, 640, 1536)  # samples; hops of a quarter
FLOOR = 5e-3  # of magnitudes at 512 samples, 65 dB under loud speech


def spectra(sound: Tensor, size: int) -> Tensor:
    """Magnitudes `[B, size // 2 + 1, T]` of `[B, n]`, comparable between sizes."""
    window = torch.hann_window(size, dtype=sound.dtype, device=sound.device)
    parts = torch.stft(sound, size, size // 4, window=window, center=False, return_complex=True)
    power = parts.real.square() + parts.imag.square()
    return (power * (512 / size) + FLOOR**2).sqrt()


def spectral_loss(made: Tensor, real: Tensor) -> Tensor:
    """Mean over resolutions of the distance of logarithms and of magnitudes.

    R. Yamamoto, E. Song, J. Kim, "Parallel WaveGAN" (2020), with means in place of norms.

    Args:
        made: `[B, n]`.
        real: `[B, n]`.
    """
    total = made.new_zeros(())
    for size in SIZES:
        ours, theirs = spectra(made, size), spectra(real, size)
        total = total + (ours.log() - theirs.log()).abs().mean()
        total = total + (ours - theirs).abs().mean() / theirs.mean()
    return total / len(SIZES)
