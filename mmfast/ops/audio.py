"""Resampling by a windowed sinc, exact for any split of the sound, and log-mel frames.

Output `j` stands at input time `j * source / rate` and is a weighted sum of the inputs around it,
with a sinc under a raised cosine as weights. They repeat with the period of the two rates, so a
period of outputs is one row of inputs times a matrix. Samples and weights are rounded to 24 bits
and multiplied as integers in float64, whose sums are exact in any order: any split gives the same
bits. Log-mel frame `i` covers samples `[160 i - 240, 160 i + 160)` with zeros before the start, so
`n` samples give `n // 160` frames and none of them waits for the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MediaError, MmfastError

LOWEST, HIGHEST = 1_000, 768_000  # samples per second
ZEROS = 16  # zero crossings of the sinc on each side
ROLLOFF = 0.95  # cut-off, as a share of half the lower rate
_SAMPLE, _TAP = 2.0**23, 2.0**24  # 53 bits hold their products' sums up to 24 dB above full scale
_BLOCK = 1 << 14  # outputs computed at once: windows of 10 minutes would be gigabytes
_LARGEST = 1 << 20  # entries of a table: 44,101 Hz to 16,000 Hz would need 700 million


def check_rate(rate: object, what: str = "the rate") -> int:
    """Return a sampling rate as an int; MediaError where sound cannot have it."""
    number = rate if isinstance(rate, int | float) and not isinstance(rate, bool) else None
    if number is None and hasattr(rate, "__index__") and not isinstance(rate, bool):
        number = int(rate.__index__())
    if number is None or not LOWEST <= number <= HIGHEST or number != int(number):
        raise MediaError(
            f"{what} {rate!r} is no sampling rate: give whole samples per second, "
            f"from {LOWEST:,} to {HIGHEST:,}, such as 16000"
        )
    return int(number)


@dataclass(frozen=True)
class _FilterPlan:
    """Table of a filter: output `j` depends on `2 reach` inputs around `j * down // up`."""

    up: int  # outputs of a period, several periods of the two rates: windows overlap little
    down: int
    reach: int  # inputs before and after its place that an output depends on
    firsts: Tensor  # `[up]` where the window of each output begins, from that of the period's first
    taps: Tensor  # `[up, 2 reach]`, whole numbers in float64
    table: Tensor | None  # `[down + 2 reach - 1, up]`, the taps as a matrix; None if too large

    def certain(self, heard: int) -> int:
        return max(0, -((self.reach - heard) * self.up // self.down))

    def whole(self, heard: int) -> int:
        return -(-heard * self.up // self.down)

    def compute(self, inputs: Tensor, first: int, start: int, stop: int) -> Tensor:
        """Outputs `[start, stop)` of `inputs` `[..., k]`, whose sample 0 has number `first`."""
        if start >= stop:
            return inputs.new_zeros((*inputs.shape[:-1], 0))
        if self.table is None:
            return self._singly(inputs, first, start, stop)
        turn, turns = start // self.up, -(-stop // self.up)
        # Whole periods: the surplus is computed from zeros and cut off again.
        low, high = turn * self.down - self.reach + 1, turns * self.down + self.reach
        whole = F.pad(inputs, (first - low, high - first - inputs.shape[-1]))
        windows = whole.unfold(-1, self.down + 2 * self.reach - 1, self.down)  # [..., T, K]
        table, many = self.table.to(inputs.device), max(1, _BLOCK // self.up)
        parts = [_times(part, table).to(inputs.dtype) for part in windows.split(many, dim=-2)]
        cut = start - turn * self.up
        return torch.cat(parts, dim=-2).flatten(-2)[..., cut : cut + stop - start]

    def _singly(self, inputs: Tensor, first: int, start: int, stop: int) -> Tensor:
        """Compute the outputs one by one, for rates of a long period such as 44,101 Hz."""
        windows = inputs.unfold(-1, 2 * self.reach, 1)  # [..., k', 2 reach], no copy
        parts = []
        for at in range(start, stop, _BLOCK):
            turn = at // self.up
            j = torch.arange(at, min(at + _BLOCK, stop)) - turn * self.up
            place = j // self.up * self.down + self.firsts[j % self.up]
            rows = place + turn * self.down - first - self.reach + 1
            spans = windows[..., rows.to(inputs.device), None, :]  # [..., j, 1, 2 reach]
            taps = self.taps[j % self.up].to(inputs.device)[..., None]
            parts.append(_times(spans, taps)[..., 0, 0].to(inputs.dtype))
        return torch.cat(parts, dim=-1)


def _times(samples: Tensor, taps: Tensor) -> Tensor:
    """Multiply samples `[..., T, K]` by whole-numbered taps `[..., K, m]` in float64."""
    return (samples.double() * _SAMPLE).round() @ taps * (1.0 / (_SAMPLE * _TAP))


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _plan(source: int, rate: int, zeros: int, rolloff: float) -> _FilterPlan:
    shared = math.gcd(source, rate)
    cutoff = min(source, rate) * rolloff / source  # in half cycles per input sample
    reach = math.ceil(zeros / cutoff)
    periods = -(-2 * reach * shared // source)
    up, down = rate // shared * periods, source // shared * periods
    firsts = (torch.arange(up) * down).div(up, rounding_mode="floor")
    time = torch.arange(up, dtype=torch.float64) * down / up  # [up] in input samples
    near = torch.arange(1 - reach, reach + 1)
    away = (firsts[:, None] + near - time[:, None]) * cutoff  # [up, 2 reach]
    window = torch.cos(away.clamp(-zeros, zeros) * (math.pi / zeros / 2)).square()
    taps, width = (torch.sinc(away) * window * cutoff * _TAP).round(), down + 2 * reach - 1
    table = None
    if up * width <= _LARGEST:
        at = firsts[:, None] + torch.arange(2 * reach)
        table = taps.new_zeros(up, width).scatter_(1, at, taps).T.contiguous()
    return _FilterPlan(up, down, reach, firsts, taps, table)


def resample(
    pcm: Tensor, source: int, rate: int, zeros: int = ZEROS, rolloff: float = ROLLOFF
) -> Tensor:
    """Resample sound `[..., n]`, rounded to 24 bits (-138 dB); no gradients.

    More `zeros` (crossings of the filter on each side) are steeper and later; `rolloff` is the
    cut-off as a share of half the lower rate. Returns `[..., ceil(n * rate / source)]`, type of
    `pcm`.
    """
    source, rate = check_rate(source), check_rate(rate)
    if source == rate:
        return pcm
    plan = _plan(source, rate, zeros, rolloff)
    padded = F.pad(pcm, (plan.reach, plan.reach))
    return plan.compute(padded, -plan.reach, 0, plan.whole(pcm.shape[-1]))


@dataclass(frozen=True)
class ResamplerState:
    """Inputs `[B, k]` that later outputs depend on, and the numbers of inputs and outputs."""

    tail: Tensor
    heard: int
    given: int


class Resampler:
    """Streaming `resample`, a `Stage` from pcm `[B, n]` at `source` to pcm `[B, m]` at `rate`.

    `delay` is the seconds of sound that an output waits for: the reach of the filter.
    """

    def __init__(
        self, source: int, rate: int, zeros: int = ZEROS, rolloff: float = ROLLOFF
    ) -> None:
        self.source, self.rate = check_rate(source), check_rate(rate)
        self._plan = _plan(self.source, self.rate, zeros, rolloff)
        self.delay = 0.0 if self.source == self.rate else self._plan.reach / self.source

    def start(self, batch: int = 1) -> ResamplerState:
        """Return the state of `batch` streams without input."""
        reach = 0 if self.source == self.rate else self._plan.reach
        return ResamplerState(torch.zeros(batch, reach), 0, 0)

    def step(self, state: ResamplerState, chunk: Tensor) -> tuple[ResamplerState, Tensor]:
        """Add samples `[B, n]`; return the outputs that they make certain, `[B, m]`."""
        if self.source == self.rate:
            return state, chunk
        plan, heard = self._plan, state.heard + chunk.shape[-1]
        inputs = torch.cat([state.tail.to(chunk.device, chunk.dtype), chunk], dim=-1)
        first, stop = heard - inputs.shape[-1], max(state.given, plan.certain(heard))
        out = plan.compute(inputs, first, state.given, stop)
        needed = stop * plan.down // plan.up - plan.reach + 1  # first input of the next output
        return ResamplerState(inputs[:, max(0, needed - first) :].clone(), heard, stop), out

    def finish(self, state: ResamplerState) -> Tensor:
        """Return the outputs that waited for later input, `[B, m]`, with silence in its place."""
        if self.source == self.rate:
            return state.tail
        inputs = F.pad(state.tail, (0, self._plan.reach))
        first, stop = state.heard - state.tail.shape[-1], self._plan.whole(state.heard)
        return self._plan.compute(inputs, first, state.given, stop)

    def reset(self, state: ResamplerState, rows: Tensor) -> ResamplerState:
        """Start streams `rows` (`[B]` bool) anew; the others have to be between two periods.

        The new streams begin with the outputs that the others still owe, near silence.
        """
        if bool(rows.all()):
            return self.start(len(rows))
        period = self.source // math.gcd(self.source, self.rate)
        if state.heard % period:
            raise MmfastError(
                f"{state.heard % period} samples of a period of {period} are pending: reset "
                f"single streams of a batch after whole periods, or keep one state per stream"
            )
        tail = state.tail.masked_fill(rows.to(state.tail.device)[:, None], 0.0)
        return ResamplerState(tail, state.heard, state.given)


RATE = 16_000  # samples per second
WINDOW = 400  # samples, also the length of the transform: bins of 40 Hz
HOP = 160  # samples: 100 frames per second
BINS = 80
FLOOR = 1e-5  # of mel power
_PAST = WINDOW - HOP  # samples of a frame that lie before its hop
_MEL_BLOCK = 4096  # frames transformed at once: 10 minutes of windows would be 200 MB


def mel_filters() -> Tensor:
    """Triangles on the HTK mel scale from 0 Hz to half the rate, `[201, 80]` of sums up to 1."""
    from torchaudio.functional import melscale_fbanks  # only where speech is heard or encoded

    found: Tensor = melscale_fbanks(WINDOW // 2 + 1, 0.0, RATE / 2, BINS, RATE)
    return found


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
    for block in views.split(_MEL_BLOCK, dim=-2):
        spectrum = torch.fft.rfft(block.to(precise) * window)
        power = spectrum.real.square() + spectrum.imag.square()
        parts.append((power @ filters).clamp(min=FLOOR).log().to(padded.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def log_mel(pcm: Tensor, precise: torch.dtype = torch.float64) -> Tensor:
    """Log-mel frames `[..., n // 160, 80]` of sound `[..., n]` at 16 kHz; differentiable.

    The natural log of `max(mel power, 1e-5)`, in the type of `pcm`. In `precise` float64 rounding
    to float32 hides how many frames were multiplied at once, so any split gives the same bits;
    float32 is faster on a GPU and enough for a loss.
    """
    return _frames(F.pad(pcm, (_PAST, 0)), precise)
