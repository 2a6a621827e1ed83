"""Bad rooms, wires and microphones: what speech goes through before the model hears it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Samples = NDArray[np.float32]
RATE = 16000


def worsen(pcm: Samples, rng: np.random.Generator) -> tuple[Samples, int]:
    """A recording as it may arrive: silence around, gain, band, noise, offset, clipping.

    Args:
        pcm: `[n]` at 16 kHz.
        rng: The source of chance; one recording in eight stays clean.

    Returns:
        The sound, and how many samples of silence were put in front.
    """
    before, after = int(rng.integers(0, 8000)), int(rng.integers(800, 6000))
    sound = np.concatenate([np.zeros(before), pcm, np.zeros(after)])
    if rng.random() < 0.125:
        return sound.astype(np.float32), before
    if rng.random() < 0.25:
        sound = band(sound, float(rng.uniform(60, 320)), float(rng.uniform(3300, 4000)))
    level = float(np.sqrt(np.mean(pcm**2))) + 1e-6
    if rng.random() < 0.6:
        shape = noise(len(sound), float(rng.choice([0.0, 0.5, 1.0])), rng)
        sound = sound + shape * level * 10 ** (-rng.uniform(8, 40) / 20)
    sound = sound * 10 ** (rng.uniform(-24, 6) / 20)
    if rng.random() < 0.2:
        sound = sound + rng.uniform(-0.1, 0.1)
    return np.clip(sound, -1, 1).astype(np.float32), before


def band(sound: NDArray[np.float64], low: float, high: float) -> NDArray[np.float64]:
    """What a narrow line lets through, its edges a few hundred hertz wide."""
    spectrum = np.fft.rfft(sound)
    hertz = np.fft.rfftfreq(len(sound), 1 / RATE)
    gain = 1 / (1 + (low / np.maximum(hertz, 1)) ** 8) / (1 + (hertz / high) ** 24)
    heard: NDArray[np.float64] = np.fft.irfft(spectrum * gain, len(sound))
    return heard


def noise(count: int, tilt: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Noise of mean square 1 whose amplitude falls with frequency to the power `tilt`."""
    spectrum = np.fft.rfft(rng.standard_normal(count))
    hertz = np.maximum(np.fft.rfftfreq(count, 1 / RATE), 40)
    sound = np.fft.irfft(spectrum / hertz**tilt, count)
    even: NDArray[np.float64] = sound / np.sqrt(np.mean(sound**2) + 1e-12)
    return even
