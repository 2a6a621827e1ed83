"""Helpers that several tests share: pixel checks."""

from __future__ import annotations

import numpy as np

STACK = "pixelprune+evs:0.5+divprune:0.2+fastv@llm3:0.5"


def flat_image(seed: int = 0) -> np.ndarray:
    """5 x 7 units of noise, in which a block of 3 x 4 units is one colour."""
    image = np.random.default_rng(seed).integers(0, 256, (40, 56, 3), dtype=np.uint8)
    image[8:32, 16:48] = (90, 30, 200)
    return image


def flat_video(frames: int = 8) -> np.ndarray:
    return np.stack([flat_image(i) for i in range(frames) for _ in range(2)])[:frames]
