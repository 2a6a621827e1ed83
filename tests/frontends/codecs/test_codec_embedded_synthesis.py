"""The embedded codec's synthesiser: harmonics, noise and their envelopes are what was asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmfast.frontends.codecs.embedded.synthesis import (
    HARMONIC_POINTS,
    HOP,
    NOISE_POINTS,
    SILENT,
    SynthesisState,
    amplitudes,
    noise_filter,
    overlap_add,
    phases,
    synthesise,
    white,
)

RATE = 16000


def test_noise_is_white_and_the_same_for_the_same_sample() -> None:
    noise = white(torch.arange(1 << 16))
    assert abs(float(noise.mean())) < 0.02 and abs(float(noise.square().mean()) - 1) < 0.02
    power = torch.fft.rfft(noise.view(-1, 256)).abs().square().mean(0)[1:-1]
    assert float(power.min() / power.mean()) > 0.7 and float(power.max() / power.mean()) < 1.3
    assert torch.equal(white(torch.arange(500, 600)), noise[500:600])


def _steady(hertz: float, hops: int, tones: float, hiss: float) -> Tensor:
    points = torch.full((1, hops, HARMONIC_POINTS + NOISE_POINTS), tones, dtype=torch.float64)
    points[..., HARMONIC_POINTS:] = hiss
    state = SynthesisState.start(1, points)
    return synthesise(state, points.new_full((1, hops), hertz), points)[1][0]


def test_a_steady_voice_is_the_sum_of_its_sines() -> None:
    """All of one phase; up to 890 Hz they have the other sign, above 7,200 Hz they fade."""
    sound = _steady(130.0, 6, math.log(0.1), -60.0)[HOP:]
    at = 130.0 * torch.arange(HOP + 1, 6 * HOP + 1, dtype=torch.float64) / RATE
    wanted = torch.zeros_like(at)
    for order in range(1, 61):
        hertz = 130.0 * order
        level = 0.1 * math.exp(-12.0 * min(1.0, max(0.0, (hertz - 7200) / 600)))
        sine = (2 * math.pi * order * at).sin()
        wanted += level * math.sqrt(130 / RATE) * (-sine if hertz <= 890 else sine)
    assert (sound - wanted).abs().max() < 1e-9


def test_phase_goes_on_while_pitch_moves() -> None:
    hertz = torch.linspace(90, 250, 12, dtype=torch.float64)[None]
    start = torch.tensor([0.3], dtype=torch.float64)
    cycles, end = phases(hertz[:, :-1], hertz[:, 1:], start)
    moved = cycles.flatten().diff() % 1.0 * RATE  # Hz
    assert (moved.diff().abs() < 0.11).all() and 89 < moved[0] < moved[-1] < 251
    assert abs(float(end) - float(cycles[0, -1, -1])) < 1e-12
    still = phases(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([0.25]))
    assert bool((still[0] == 0.25).all()) and float(still[1]) == 0.25


def test_amplitudes_follow_the_envelope() -> None:
    points = torch.linspace(0.0, -6.0, HARMONIC_POINTS, dtype=torch.float64)[None]
    found = amplitudes(points, torch.tensor([200.0], dtype=torch.float64), 45)[0]
    order = torch.arange(1, 46, dtype=torch.float64)
    mel = (1 + 200 * order / 700).log() / math.log(1 + 8000 / 700)
    wanted = (-6.0 * mel).exp() * math.sqrt(200 / RATE)
    assert torch.allclose(found[:36].abs(), wanted[:36], atol=1e-9)
    assert bool((found[:4] < 0).all()) and bool((found[4:36] > 0).all())
    assert not found[39:].any()


def test_the_noise_filter_does_not_ring_ahead() -> None:
    points = torch.zeros(NOISE_POINTS, dtype=torch.float64)
    points[10:20] = 2.0
    response = noise_filter(points)
    sound = torch.fft.irfft(response, 512)
    assert sound[256:].square().sum() < 1e-4 * sound[:256].square().sum()
    assert abs(float(response.abs().log().max()) - 2.0) < 0.05


def test_steady_noise_is_as_loud_as_its_envelope() -> None:
    sound = _steady(100.0, 60, -60.0, math.log(0.1))[800:]
    assert abs(float(sound.square().mean().sqrt()) / 0.1 - 1) < 0.05
    assert _steady(100.0, 10, SILENT, SILENT).abs().max() < 1e-5


def test_parts_that_overlap_add_up() -> None:
    draw = torch.Generator().manual_seed(0)
    parts, ringing = torch.randn(2, 3, 512, generator=draw), torch.randn(2, 352, generator=draw)
    wanted = torch.zeros(2, 2 * HOP + 512)
    wanted[:, :352] += ringing
    for hop in range(3):
        wanted[:, hop * HOP : hop * HOP + 512] += parts[:, hop]
    out, left = overlap_add(parts, ringing)
    assert torch.allclose(torch.cat([out, left], 1), wanted, atol=1e-5)
