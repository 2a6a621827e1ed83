"""Sound for the embedded codec's tests: a voice whose pitch moves, hiss, silence."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from mmfast.frontends.codecs.embedded.codec import EmbeddedCodec, load_embedded
from mmfast.frontends.codecs.embedded.synthesis import white

CHUNKS = (1, 2, 3, 7)  # frames


@cache
def codec() -> EmbeddedCodec:
    """The one that ships."""
    return load_embedded()


def voice(seconds: float, low: float = 100.0, high: float = 160.0) -> Tensor:
    """Pulses from one pitch to another, dulled as a voice is: `[n]` float32."""
    hertz = torch.linspace(low, high, int(seconds * 16000), dtype=torch.float64)
    cycles, sound = hertz.cumsum(0) / 16000, torch.zeros_like(hertz)
    for order in range(1, int(7800 / min(low, high)) + 1):
        sound += (2 * math.pi * order * cycles).cos() * (order * hertz < 7800)
    dull = 0.9 ** torch.arange(60, dtype=torch.float64)
    sound = torch.nn.functional.conv1d(
        torch.nn.functional.pad(sound, (59, 0))[None, None], dull.flip(0)[None, None]
    )[0, 0]
    return (0.5 * sound / sound.abs().max()).float()


@cache
def speech() -> Tensor:
    """Voice, a pause, hiss, voice: `[2, n]` float32, n a multiple of nothing."""
    hiss = 0.05 * white(torch.arange(5000)).float()
    one = torch.cat([voice(0.8), torch.zeros(4001), hiss, voice(0.7, 210, 180)])
    return torch.stack([one, one.roll(7000)])


@cache
def spoken_codes(frames: int = 43) -> Tensor:
    """Codes that change from frame to frame `[2, Q, T]`."""
    draw = torch.Generator().manual_seed(5)
    heard = codec().encode(speech())[:, :, :frames]
    loose = torch.randint(codec().size, heard.shape, generator=draw)
    return torch.where(torch.rand(heard.shape, generator=draw) < 0.3, loose, heard)
