"""Voice from pitch and envelopes: pulses and noise, each through a minimum-phase filter.

A harmonic-plus-noise synthesiser (X. Serra, J. Smith, 1990) with filters in place of single
sinusoids: pulses are a closed sum of cosines, so nothing aliases; the filters fade from one hop's
to the next's. The phase, the count of samples (which draws the noise) and what filters ring on are
carried from hop to hop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

RATE, HOP = 16_000, 160
SIZE = 512  # of the transform: a filter rings for 22 ms, longer than its envelope is sharp
BINS = SIZE // 2 + 1
HARMONIC_POINTS, NOISE_POINTS = 64, 32  # of the envelopes, evenly spaced in mel
POINTS = HARMONIC_POINTS + NOISE_POINTS
SILENT = -14.0  # log magnitude of nothing
_EDGE, _END = 7200.0, 7800.0  # Hz: pulses fade out, so that a harmonic comes and goes unheard


@dataclass(frozen=True)
class SynthesisState:
    """What one hop leaves to the next, of `B` streams."""

    points: Tensor  # [B, 96] log magnitudes of the hop before
    pitch: Tensor  # [B] Hz of the hop before; 0 before the first
    phase: Tensor  # [B] cycles, 0 to 1
    count: Tensor  # [B] int64, samples made
    ringing: Tensor  # [B, SIZE - HOP]

    @staticmethod
    def start(batch: int, like: Tensor) -> SynthesisState:
        """Streams in silence."""
        return SynthesisState(
            like.new_full((batch, POINTS), SILENT),
            like.new_zeros(batch),
            like.new_zeros(batch),
            torch.zeros(batch, dtype=torch.long, device=like.device),
            like.new_zeros(batch, SIZE - HOP),
        )


def white(index: Tensor) -> Tensor:
    """Noise of unit power that depends on the number of a sample alone (a hash of it).

    Args:
        index: int64, any shape.
    """
    mixed = (index + 1) * 0x5851F42D4C957F2D  # wraps round, as meant
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 32)) & 0xFFFFFF
    return (mixed.double() / 0x800000 - 1.0) * math.sqrt(3.0)


def _minimum_phase(shape: Tensor) -> Tensor:
    """Log responses `[..., BINS]` complex of log magnitudes: the phase is linear in them."""
    fold = shape.new_zeros(SIZE)
    fold[0] = fold[SIZE // 2] = 1.0
    fold[1 : SIZE // 2] = 2.0
    return torch.fft.rfft(torch.fft.irfft(shape, SIZE) * fold)


@cache
def _responses(points: int) -> Tensor:
    """Log response of each point of an envelope, linear in mel between them `[points, BINS]`."""
    hertz = torch.linspace(0.0, RATE / 2, BINS, dtype=torch.float64)
    mel = (1.0 + hertz / 700.0).log()
    place = mel / mel[-1] * (points - 1)
    shape = (1.0 - (place - torch.arange(points)[:, None]).abs()).clamp(min=0.0)
    return _minimum_phase(shape)


@cache
def _constants() -> tuple[Tensor, Tensor]:
    """Log response that fades pulses out at the top `[BINS]`, and the rise over a hop `[HOP]`."""
    hertz = torch.linspace(0.0, RATE / 2, BINS, dtype=torch.float64)
    fade = _minimum_phase(-12.0 * ((hertz - _EDGE) / (_END - _EDGE)).clamp(0.0, 1.0))
    rise = 0.5 - 0.5 * torch.cos((torch.arange(HOP, dtype=torch.float64) + 0.5) * math.pi / HOP)
    return fade, rise


def _apply(points: Tensor, table: Tensor) -> Tensor:
    real, imaginary = table.real.to(points), table.imag.to(points)
    return torch.complex(points @ real, points @ imaginary)


def filters(points: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum-phase responses of pulses and of noise, `[..., BINS]` complex, of `[..., 96]`."""
    tones, breath = points.split((HARMONIC_POINTS, NOISE_POINTS), -1)
    voiced = _apply(tones, _responses(HARMONIC_POINTS))
    voiced = voiced + _constants()[0].to(points.device, voiced.dtype)
    return voiced.exp(), _apply(breath, _responses(NOISE_POINTS)).exp()


def pulses(before: Tensor, pitch: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of all cosines under 7.8 kHz, hop by hop.

    Args:
        before: Hz at the start of each hop `[B, T]`; with 0 here and there a hop is silent.
        pitch: Hz at its end `[B, T]`; in between it moves in a line.
        phase: Cycles at the start of the first `[B]`.

    Returns:
        `[B, T, HOP]`, and the phase behind the last hop `[B]`.
    """
    n = torch.arange(1, HOP + 1, dtype=pitch.dtype, device=pitch.device)
    slope = (pitch - before)[..., None] / (2 * HOP)
    cycles = (before[..., None] * n + slope * n * (n + 1)) / RATE  # [B, T, HOP] since its start
    total = cycles[..., -1].cumsum(-1)
    starts = phase[:, None] + torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1)
    at = (starts[..., None] + cycles) % 1.0
    count = (_END / torch.maximum(before, pitch).clamp(min=1.0)).floor()[..., None]
    low = (math.pi * at).sin()
    safe = torch.where(low.abs() < 1e-6, torch.ones_like(low), low)
    wave = 0.5 * ((2 * count + 1) * math.pi * at).sin() / safe - 0.5
    wave = torch.where(low.abs() < 1e-6, count.expand_as(wave), wave)
    return wave * (before[..., None] / RATE).sqrt(), (phase + total[:, -1]) % 1.0


def synthesise(
    state: SynthesisState, pitch: Tensor, points: Tensor, active: Tensor | None = None
) -> tuple[SynthesisState, Tensor]:
    """Hops of sound.

    Args:
        state: What the hop before left.
        pitch: Hz at the end of each hop `[B, T]`.
        points: Log magnitudes of the envelopes at the end of each hop `[B, T, 96]`.
        active: Hops that are there `[B, T]` bool; the others are silence before a stream starts.

    Returns:
        The state behind them, and sound `[B, T * 160]`.
    """
    rise = _constants()[1].to(points)
    if active is not None:
        points = torch.where(active[..., None], points, torch.full_like(points, SILENT))
        pitch = torch.where(active, pitch, torch.zeros_like(pitch))
    live = torch.ones_like(pitch) if active is None else active.to(pitch.dtype)
    before = torch.cat([state.pitch[:, None], pitch[:, :-1]], 1)
    before = torch.where(before > 0, before, pitch)
    tones, phase = pulses(before, pitch, state.phase)
    steps = (live * HOP).long().cumsum(1)  # [B, T] samples behind each hop
    index = (state.count[:, None] + steps - HOP)[..., None] + torch.arange(HOP, device=pitch.device)
    breath = white(index).to(points)
    both = torch.cat([state.points[:, None], points], 1)
    voiced, noisy = filters(both)  # [B, T + 1, BINS]
    sides = ((1 - rise, slice(None, -1)), (rise, slice(1, None)))
    spectrum = sum(
        torch.fft.rfft(tones * side, SIZE) * voiced[:, at]
        + torch.fft.rfft(breath * side, SIZE) * noisy[:, at]
        for side, at in sides
    )
    sound = torch.fft.irfft(spectrum, SIZE) * live[..., None]
    out, ringing = overlap_add(sound, state.ringing)
    count = state.count + steps[:, -1]
    return SynthesisState(both[:, -1], pitch[:, -1], phase, count, ringing), out


def overlap_add(parts: Tensor, ringing: Tensor) -> tuple[Tensor, Tensor]:
    """Add up parts that start a hop apart.

    Args:
        parts: `[B, T, SIZE]`.
        ringing: What earlier parts left `[B, SIZE - HOP]`.

    Returns:
        `[B, T * HOP]`, and what is left over.
    """
    batch, hops, _ = parts.shape
    length = (hops - 1) * HOP + SIZE
    added = torch.nn.functional.fold(parts.mT, (1, length), (1, SIZE), stride=(1, HOP)).reshape(
        batch, length
    )
    head = torch.nn.functional.pad(ringing, (0, length - ringing.shape[1]))
    added = added + head
    return added[:, : hops * HOP], added[:, hops * HOP :]
