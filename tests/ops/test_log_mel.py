"""Log-mel frames: against a slow oracle, against torchaudio, and the same for any length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast.ops.audio import _tables, log_mel, mel_filters


def noise(samples: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.3 * torch.randn(batch, samples, generator=generator)


def by_hand(pcm: torch.Tensor, frame: int) -> torch.Tensor:
    """One frame from the definition: a discrete Fourier sum and triangles, in loops."""
    window = [0.5 - 0.5 * math.cos(2 * math.pi * k / 400) for k in range(400)]
    at = [160 * frame - 240 + k for k in range(400)]
    samples = torch.tensor(
        [float(pcm[i]) * w if i >= 0 else 0.0 for i, w in zip(at, window, strict=True)],
        dtype=torch.float64,
    )
    turn = torch.arange(400, dtype=torch.float64) * (2 * math.pi / 400)
    power = torch.stack(
        [
            (samples * torch.cos(turn * f)).sum() ** 2 + (samples * torch.sin(turn * f)).sum() ** 2
            for f in range(201)
        ]
    )
    top = 2595 * math.log10(1 + 8000 / 700)
    edge = [700 * (10 ** (top * m / 81 / 2595) - 1) for m in range(82)]
    out = []
    for m in range(80):
        low, mid, high = edge[m : m + 3]
        total = 0.0
        for f in range(201):
            hertz = 40.0 * f
            if low < hertz <= mid:
                total += float(power[f]) * (hertz - low) / (mid - low)
            elif mid < hertz < high:
                total += float(power[f]) * (high - hertz) / (high - mid)
        out.append(math.log(max(total, 1e-5)))
    return torch.tensor(out)


def test_frames_follow_the_definition() -> None:
    pcm = noise(1000)
    frames = log_mel(pcm)
    assert frames.shape == (1, 6, 80)
    for i in (0, 1, 5):
        torch.testing.assert_close(frames[0, i], by_hand(pcm[0], i), atol=1e-5, rtol=1e-5)


def test_equals_torchaudio() -> None:
    transforms = pytest.importorskip("torchaudio.transforms")
    mel = transforms.MelSpectrogram(
        sample_rate=16000, n_fft=400, hop_length=160, n_mels=80, center=False
    )
    pcm = noise(16_123, batch=2)
    padded = torch.nn.functional.pad(pcm, (240, 0))
    theirs = mel(padded).clamp(min=1e-5).log().transpose(-1, -2)
    torch.testing.assert_close(log_mel(pcm), theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(mel_filters().float(), mel.mel_scale.fb, atol=1e-5, rtol=0.0)


def test_silence_is_the_floor_and_every_bin_hears() -> None:
    assert torch.equal(log_mel(torch.zeros(3, 480)), torch.full((3, 3, 80), math.log(1e-5)))
    assert bool((mel_filters().sum(dim=0) > 0).all())


@settings(max_examples=40)
@given(st.integers(0, 12), st.integers(0, 700), st.integers(0, 5))
def test_a_frame_depends_on_its_own_samples_alone(frames: int, rest: int, seed: int) -> None:
    pcm = noise(160 * frames + rest, batch=2, seed=seed)
    assert torch.equal(log_mel(pcm[:, : 160 * frames]), log_mel(pcm)[:, :frames])


def test_blocks_of_long_sound_join_without_a_seam() -> None:
    pcm = noise(160 * 4100)
    assert torch.equal(log_mel(pcm)[:, 4090:], log_mel(pcm[:, 160 * 4080 :])[:, 10:])


def test_gradients_flow() -> None:
    _tables.cache_clear()
    with torch.inference_mode():
        log_mel(noise(800))  # tables made here must not be in the way
    pcm = noise(800).requires_grad_()
    log_mel(pcm).sum().backward()
    assert pcm.grad is not None
    assert float(pcm.grad.abs().sum()) > 0
