"""Sound from pitch and envelopes: a sum of harmonics, and noise through a filter.

A harmonic-plus-noise synthesiser (X. Serra, J. Smith, 1990). Harmonics are sines of one phase,
those up to 890 Hz turned upside down, as in the formant synthesiser the codec is fitted to: the
shape of its waves comes back, not their spectrum alone. The noise filter is minimum-phase, so
nothing sounds before its time. Phase, the count of samples (which seeds the noise) and the tail of
the filter are carried from hop to hop; amplitudes and filters are interpolated in between.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

RATE, HOP = 16_000, 160
SIZE = 512  # of the transform: a filter rings for 22 ms, longer than its envelope is sharp
BINS = SIZE // 2 + 1
HARMONIC_POINTS, NOISE_POINTS = 64, 32  # of the envelopes, evenly spaced in mel
POINTS = HARMONIC_POINTS + NOISE_POINTS
SILENT = -14.0  # log magnitude of nothing
_EDGE, _END = 7200.0, 7800.0  # Hz: harmonics fade out, so that one comes and goes unheard
_TURN = 890.0  # Hz: harmonics up to here have the other sign, which keeps peaks low
_AT_ONCE = 4_000_000  # sines


class SynthesisState(NamedTuple):
    """State of `B` streams between two hops."""

    points: Tensor  # [B, 96] log magnitudes of the hop before
    pitch: Tensor  # [B] Hz of the hop before; 0 before the first
    phase: Tensor  # [B] cycles, 0 to 1
    made: Tensor  # [B] int64, samples so far
    ringing: Tensor  # [B, SIZE - HOP]

    @staticmethod
    def start(batch: int, like: Tensor) -> SynthesisState:
        """Return streams in silence."""
        return SynthesisState(
            like.new_full((batch, POINTS), SILENT),
            like.new_zeros(batch),
            like.new_zeros(batch),
            torch.zeros(batch, dtype=torch.long, device=like.device),
            like.new_zeros(batch, SIZE - HOP),
        )


def white(index: Tensor) -> Tensor:
    """Noise of unit power, a hash of the number (int64) of each sample."""
    mixed = (index + 1) * 0x5851F42D4C957F2D  # wraps around on purpose
    mixed = (mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 32)) & 0xFFFFFF
    return (mixed.double() / 0x800000 - 1.0) * math.sqrt(3.0)


def _minimum_phase(shape: Tensor) -> Tensor:
    """Complex log responses `[..., BINS]` of log magnitudes; the phase is linear in them."""
    fold = shape.new_zeros(SIZE)
    fold[0] = fold[SIZE // 2] = 1.0
    fold[1 : SIZE // 2] = 2.0
    folded: Tensor = torch.fft.rfft(torch.fft.irfft(shape, SIZE) * fold)
    return folded


def _place(hertz: Tensor, points: int) -> Tensor:
    """Places of frequencies between the points of an envelope, which are even in mel."""
    return (1.0 + hertz / 700.0).log() * ((points - 1) / math.log(1 + RATE / 2 / 700.0))


@cache
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _responses() -> Tensor:
    """Log response of each point of the noise's envelope `[32, BINS]`."""
    place = _place(torch.linspace(0.0, RATE / 2, BINS, dtype=torch.float64), NOISE_POINTS)
    shape = (1.0 - (place - torch.arange(NOISE_POINTS)[:, None]).abs()).clamp(min=0.0)
    return _minimum_phase(shape)


@cache
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _rise() -> Tensor:
    """Weights with which a hop is faded from its start to its end, `[HOP]`."""
    spots = torch.arange(HOP, dtype=torch.float64) + 0.5
    return 0.5 - 0.5 * torch.cos(spots * math.pi / HOP)


def noise_filter(points: Tensor) -> Tensor:
    """Minimum-phase response `[..., BINS]` complex of log magnitudes `[..., 32]`."""
    table = _responses()
    real, imaginary = table.real.to(points), table.imag.to(points)
    return torch.complex(points @ real, points @ imaginary).exp()


def amplitudes(points: Tensor, pitch: Tensor, count: int) -> Tensor:
    """Signed amplitudes `[..., count]` of harmonics, by an envelope `[..., 64]` and Hz `[...]`."""
    hertz = pitch[..., None] * torch.arange(1, count + 1, dtype=pitch.dtype, device=pitch.device)
    place = _place(hertz, HARMONIC_POINTS).clamp(max=HARMONIC_POINTS - 1.001)
    low = place.floor().long()
    part = place - low
    height = points.gather(-1, low) * (1 - part) + points.gather(-1, low + 1) * part
    height = height - 12.0 * ((hertz - _EDGE) / (_END - _EDGE)).clamp(0.0, 1.0)
    sign = torch.where(hertz <= _TURN, -1.0, 1.0) * (hertz <= _END)
    return height.exp() * sign * (pitch[..., None] / RATE).sqrt()


def phases(before: Tensor, pitch: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    """Cycles of the first harmonic `[B, T, HOP]`, and the phase after the last hop `[B]`.

    `before` and `pitch` `[B, T]` are Hz at both ends of each hop, linear in between; 0 at both ends
    stops the phase.
    """
    n = torch.arange(1, HOP + 1, dtype=pitch.dtype, device=pitch.device)
    slope = (pitch - before)[..., None] / (2 * HOP)
    cycles = (before[..., None] * n + slope * n * (n + 1)) / RATE  # [B, T, HOP] since its start
    total = cycles[..., -1].cumsum(-1)
    starts = phase[:, None] + torch.cat([torch.zeros_like(total[:, :1]), total[:, :-1]], 1)
    return (starts[..., None] + cycles) % 1.0, (phase + total[:, -1]) % 1.0


def harmonics(cycles: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """Sum `[B, T, HOP]` of harmonics with amplitudes `[B, T, K]` at both ends of each hop."""
    order = torch.arange(1, start.shape[-1] + 1, dtype=cycles.dtype, device=cycles.device)
    rise, both = _rise().to(start), torch.stack([start, end], -1)  # [B, T, K, 2]
    hops = max(1, _AT_ONCE // (len(cycles) * HOP * len(order)))
    parts = []
    for angle, pair in zip(cycles.split(hops, 1), both.split(hops, 1), strict=True):
        sines = (2 * math.pi * angle[..., None] * order).sin()  # [B, t, HOP, K]
        ends = sines @ pair
        parts.append(ends[..., 0] * (1 - rise) + ends[..., 1] * rise)
    return torch.cat(parts, 1)


def synthesise(
    state: SynthesisState, pitch: Tensor, points: Tensor, active: Tensor | None = None
) -> tuple[SynthesisState, Tensor]:
    """Synthesise hops of sound `[B, T * 160]` after `state`, which is returned anew.

    `pitch` `[B, T]` in Hz and log magnitudes `points` `[B, T, 96]` are those at the end of each
    hop; hops that are not `active` `[B, T]` are silent.
    """
    if active is not None:
        points = torch.where(active[..., None], points, torch.full_like(points, SILENT))
        pitch = torch.where(active, pitch, torch.zeros_like(pitch))
    live = torch.ones_like(pitch) if active is None else active.to(pitch.dtype)
    ends = torch.cat([state.pitch[:, None], pitch], 1)  # [B, T + 1] of hops, Hz
    before = torch.where(ends[:, :-1] > 0, ends[:, :-1], pitch)
    cycles, phase = phases(before, pitch, state.phase)
    both = torch.cat([state.points[:, None], points], 1)
    tones, breath = both.split((HARMONIC_POINTS, NOISE_POINTS), -1)  # [B, T + 1, ...]
    heights = amplitudes(tones, ends, _count(ends))
    sound = harmonics(cycles, heights[:, :-1], heights[:, 1:])
    steps = (live * HOP).long().cumsum(1)  # [B, T] samples up to the end of each hop
    hiss, ringing = _noise(state.made[:, None] + steps - HOP, breath, live, state.ringing)
    made = state.made + steps[:, -1]
    new = SynthesisState(both[:, -1], pitch[:, -1], phase, made, ringing)
    return new, sound.flatten(1) + hiss


def _count(pitch: Tensor) -> int:
    """Number of harmonics of the lowest pitch below 7.8 kHz."""
    there = pitch[pitch > 0]
    return int(_END / float(there.min())) if len(there) else 1


def _noise(first: Tensor, points: Tensor, live: Tensor, ringing: Tensor) -> tuple[Tensor, Tensor]:
    """Noise of hops whose first samples have numbers `[B, T]`, and the tail of the filter."""
    index = first[..., None] + torch.arange(HOP, device=first.device)
    hiss, rise, response = white(index).to(points), _rise().to(points), noise_filter(points)
    sides = torch.stack([1 - rise, rise])  # [2, HOP]
    halves = torch.fft.rfft(hiss[..., None, :] * sides, SIZE)  # [B, T, 2, BINS]
    spectrum = halves[..., 0, :] * response[:, :-1] + halves[..., 1, :] * response[:, 1:]
    return overlap_add(torch.fft.irfft(spectrum, SIZE) * live[..., None], ringing)


def overlap_add(parts: Tensor, ringing: Tensor) -> tuple[Tensor, Tensor]:
    """Add up parts `[B, T, SIZE]` a hop apart and the tail before: `[B, T * HOP]`, and a tail."""
    batch, hops, _ = parts.shape
    length = (hops - 1) * HOP + SIZE
    added = torch.nn.functional.fold(parts.mT, (1, length), (1, SIZE), stride=(1, HOP)).reshape(
        batch, length
    )
    head = torch.nn.functional.pad(ringing, (0, length - ringing.shape[1]))
    added = added + head
    return added[:, : hops * HOP], added[:, hops * HOP :]
