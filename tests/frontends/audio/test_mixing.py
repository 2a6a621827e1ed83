"""Channels that cancel each other: their mean would be silence, whatever brought them."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from audio_factory import encoded, tone

from mmfast.frontends.audio.packets import mix_channels
from mmfast.frontends.audio.reader import decode_pcm, iter_audio, load_audio

WANTED = tone(16000)[:, 0]
AGAINST = np.stack([WANTED, -WANTED], 1)  # [n, 2], one plug wired the wrong way round


def _raw() -> torch.Tensor:
    return decode_pcm((AGAINST * 32767).astype("<i2").tobytes(), "pcm16", 2)[0]


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda: load_audio(AGAINST), id="array"),
        pytest.param(lambda: load_audio(torch.from_numpy(AGAINST.T)), id="tensor"),
        pytest.param(lambda: load_audio(encoded(AGAINST, 16000, "WAV", "PCM_24")), id="wav"),
        pytest.param(lambda: load_audio(encoded(AGAINST, 16000, "FLAC", "PCM_16")), id="flac"),
        pytest.param(lambda: load_audio(encoded(AGAINST, 16000, "NIST", "PCM_16")), id="nist"),
        pytest.param(lambda: torch.cat([*iter_audio(AGAINST[i : i + 800] for i in (0, 800))]),
                     id="chunks"),
        pytest.param(_raw, id="raw"),
    ],
)  # fmt: skip
def test_channels_that_cancel_are_heard(read: Any) -> None:
    got = read()[200:1300]
    assert float((got - torch.from_numpy(WANTED)[200:1300]).abs().max()) < 1e-3


def test_other_channels_are_averaged() -> None:
    """One loud channel, noise, and channels that are alike lose nothing that they are not to."""
    noise = torch.randn(4, 4000, generator=torch.Generator().manual_seed(0)) / 10
    alone = torch.zeros(64, 4000)
    alone[3] = noise[0]
    for channels in (noise, noise[:2], noise[:1].expand(6, -1), alone, noise[:, :9], -0.5 * noise):
        assert torch.equal(mix_channels(channels), channels.mean(0))
    near = torch.stack([noise[0], -0.8 * noise[0]])  # what is left can be heard
    assert torch.equal(mix_channels(near), near.mean(0))
    odd = torch.full((2, 500), torch.nan)
    assert bool(mix_channels(odd).isnan().all())


def test_a_silent_channel_is_not_taken_for_a_loud_one() -> None:
    """Of six channels two cancel: the first of these is heard, not the silence before it."""
    channels = np.zeros((1600, 6), np.float32)
    channels[:, 2], channels[:, 4] = WANTED[:1600], -WANTED[:1600]
    file = io.BytesIO()
    soundfile.write(file, channels, 16000, format="WAV", subtype="FLOAT")
    got = load_audio(file.getvalue())
    assert float((got - torch.from_numpy(WANTED)[:1600]).abs().max()) < 1e-3
