"""Log-mel frames of 16 kHz sound, offline and as a stage: the same frames whatever the split.

Frame `i` covers samples `[160 i - 240, 160 i + 160)`, zeros before the start: it is certain as soon
as its own hop is there, so `n` samples give `n // 160` frames and nothing waits for the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MmfastError

RATE = 16_000  # samples per second
WINDOW = 400  # samples, also the length of the transform: bins of 40 Hz
HOP = 160  # samples: 100 frames per second
BINS = 80
FLOOR = 1e-5  # of mel power
_PAST = WINDOW - HOP  # samples of a frame that lie before its hop
_BLOCK = 4096  # frames transformed at once: 10 minutes of windows would be 200 MB


def mel_filters(
    bins: int = BINS, size: int = WINDOW, rate: int = RATE, top: float | None = None
) -> Tensor:
    """Triangles on the HTK mel scale, peak 1, from 0 Hz to `top` (half the rate when left out).

    Returns:
        `[size // 2 + 1, bins]`, float64: one column per mel bin.
    """
    highest = 2595.0 * math.log10(1.0 + (rate / 2 if top is None else top) / 700.0)
    mels = torch.linspace(0.0, highest, bins + 2, dtype=torch.float64)
    edges = 700.0 * (10.0 ** (mels / 2595.0) - 1.0)  # [bins + 2] Hz
    hertz = torch.linspace(0.0, rate / 2, size // 2 + 1, dtype=torch.float64)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (hertz - left) / (centre - left), (right - hertz) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0.0)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _tables(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    window = torch.hann_window(WINDOW, periodic=True, dtype=torch.float64)
    return window.to(device, dtype), mel_filters().to(device, dtype)


def _frames(padded: Tensor, precise: torch.dtype) -> Tensor:
    """`[..., 240 + 160 T + less than a hop]` with its past in front to `[..., T, 80]`."""
    window, filters = _tables(precise, padded.device)
    count = max(0, (padded.shape[-1] - _PAST) // HOP)
    if not count:
        return padded.new_zeros((*padded.shape[:-1], 0, BINS))
    views = padded.unfold(-1, WINDOW, HOP)  # [..., T, 400], no copy yet
    parts = []
    for block in views.split(_BLOCK, dim=-2):
        spectrum = torch.fft.rfft(block.to(precise) * window)
        power = spectrum.real.square() + spectrum.imag.square()
        parts.append((power @ filters).clamp(min=FLOOR).log().to(padded.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def log_mel(pcm: Tensor, precise: torch.dtype = torch.float64) -> Tensor:
    """Log-mel frames of sound at 16 kHz; differentiable.

    Args:
        pcm: `[..., n]` float, -1..1.
        precise: What it is computed in. In float64 (default) rounding to float32 hides how many
            frames were multiplied at once, so any split gives the same bits; float32 is faster on
            a GPU and enough for a loss.

    Returns:
        `[..., n // 160, 80]`: natural log of `max(mel power, 1e-5)`, in the type of `pcm`.
    """
    return _frames(F.pad(pcm, (_PAST, 0)), precise)


@dataclass(frozen=True)
class LogMelState:
    """Samples that coming frames still cover: 240 of the past and the hop begun, `[B, 240 + r]`."""

    tail: Tensor


class LogMel:
    """`log_mel` as a `Stage`: pcm `[B, n]` in, frames `[B, t, 80]` out, no delay beyond the hop."""

    rate = RATE
    hop = HOP
    bins = BINS

    def start(self, batch: int = 1) -> LogMelState:
        """The state of `batch` streams that have heard nothing."""
        return LogMelState(torch.zeros(batch, _PAST))

    def step(self, state: LogMelState, chunk: Tensor) -> tuple[LogMelState, Tensor]:
        """Add samples `[B, n]`, `n` of any size; give the frames they complete `[B, t, 80]`."""
        heard = torch.cat([state.tail.to(chunk.device, chunk.dtype), chunk], dim=-1)
        done = (heard.shape[-1] - _PAST) // HOP * HOP
        return LogMelState(heard[:, done:].clone()), _frames(heard, torch.float64)

    def finish(self, state: LogMelState) -> Tensor:
        """A last part of a hop makes no frame: `[B, 0, 80]`."""
        return state.tail.new_zeros(state.tail.shape[0], 0, BINS)

    def reset(self, state: LogMelState, rows: Tensor) -> LogMelState:
        """Start streams `rows` (`[B]` bool) anew; the others go on.

        Raises:
            MmfastError: The other streams are in the middle of a hop, which the frames of one
                batch share.
        """
        started = state.tail.shape[-1] - _PAST
        if started and not bool(rows.all()):
            raise MmfastError(
                f"{started} samples of a hop of {HOP} are pending: reset single streams of a "
                f"batch after whole hops, or keep one state per stream"
            )
        tail = state.tail[:, :_PAST] if started else state.tail
        return replace(state, tail=tail.masked_fill(rows.to(tail.device)[:, None], 0.0))
