"""Voice activity: the probability of speech per 32 ms, and the begin and end of speech.

`Silero` runs the network of silero-vad (a Fourier transform by convolution, four convolutions, an
LSTM cell, a sigmoid) on the weights in its wheel, with its memory as a value. The package's own
wrapper keeps one conversation inside the model, and importing it sets the number of threads of the
whole process; so the file of weights (safetensors, 1.2 MB) is read without it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import MmfastError, ModelError, SpecError, unknown

WINDOW = 512  # samples of a decision
_CONTEXT = 64  # samples of the window before, which are part of the input
_BINS = 129
_STRIDES = (1, 2, 2, 1)
_FILE = "silero_vad_16k.safetensors"


@dataclass(frozen=True)
class SileroState:
    """Memory of `B` streams: the cell `[2, B, 128]`, and the end of the last window `[B, 64]`."""

    cell: Tensor
    context: Tensor


@lru_cache(maxsize=1)
@torch.inference_mode(False)  # it outlives the call: later ones may need gradients
def _weights() -> dict[str, Tensor]:
    found = importlib.util.find_spec("silero_vad")  # finds it, does not run it
    file = Path(found.origin).parent / "data" / _FILE if found and found.origin else None
    if file is None or not file.is_file():
        what = "is not installed" if file is None else f"is too old: it has no {_FILE}"
        raise ModelError(
            f"silero-vad {what}: pip install 'mmfast[speech]' (silero-vad>=6.2), or name the "
            f"simple detector, engine='energy' (mmfast talk: --whole, if the file is one question)"
        )
    from safetensors.torch import load_file

    return load_file(file)


class Silero:
    """Probability that a window of 512 samples at 16 kHz holds speech, by silero-vad's network."""

    window = WINDOW

    def __init__(self) -> None:
        self._weights = _weights()

    def start(self, batch: int) -> SileroState:
        """Return the memory of streams without input."""
        return SileroState(torch.zeros(2, batch, 128), torch.zeros(batch, _CONTEXT))

    def step(self, state: SileroState, samples: Tensor) -> tuple[SileroState, Tensor]:
        """Return probabilities `[B]` for samples `[B, 512]` in -1..1."""
        w = self._weights
        seen = F.pad(torch.cat([state.context, samples], dim=1)[:, None], (0, 64), mode="reflect")
        with torch.no_grad():
            parts = F.conv1d(seen, w["stft_conv.weight"], stride=128)  # [B, 2 * 129, 4]
            x = (parts[:, :_BINS].square() + parts[:, _BINS:].square()).sqrt()
            for number, stride in enumerate(_STRIDES, start=1):
                weight, bias = w[f"conv{number}.weight"], w[f"conv{number}.bias"]
                x = F.conv1d(x, weight, bias, stride=stride, padding=1).relu()
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            cell = [w[f"lstm_cell.{name}"] for name in names]
            h, c = torch.lstm_cell(x[..., 0], (state.cell[0], state.cell[1]), *cell)
            voice = F.conv1d(h.relu()[..., None], w["final_conv.weight"], w["final_conv.bias"])
        context = samples[:, -_CONTEXT:].clone()
        return SileroState(torch.stack([h, c]), context), voice[:, 0, 0].sigmoid()

    def reset(self, state: SileroState, rows: Tensor) -> SileroState:
        """Return the memory with streams `rows` (`[B]` bool) started anew."""
        cell = state.cell.masked_fill(rows[None, :, None], 0.0)
        return SileroState(cell, state.context.masked_fill(rows[:, None], 0.0))


_QUIETEST = -60.0  # dB of full scale: lowest level of the noise
_MARGIN = 12.0  # dB above the noise that count as half a voice
_SLOPE = 2.0  # dB
_RISE = 0.05  # dB per window by which the noise estimate rises while it is loud


class Energy:
    """Loudness of a window above the noise before it, which takes any loud noise for speech.

    The state, the level of the noise `[B]` in dB, falls at once and rises 1.5 dB a second.
    """

    window = WINDOW

    def start(self, batch: int) -> Tensor:
        """Return a low level of noise."""
        return torch.full((batch,), _QUIETEST)

    def step(self, state: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
        """Return pseudo-probabilities `[B]` for samples `[B, 512]` in -1..1."""
        moved = samples - samples.mean(dim=1, keepdim=True)  # without the offset
        level = 10.0 * moved.square().mean(dim=1).clamp(min=1e-12).log10()
        noise = torch.minimum(state + _RISE, level).clamp(min=_QUIETEST)
        return noise, ((level - noise - _MARGIN) / _SLOPE).sigmoid()

    def reset(self, state: Tensor, rows: Tensor) -> Tensor:
        """Return the state with streams `rows` (`[B]` bool) started anew."""
        return state.masked_fill(rows, _QUIETEST)


RATE = 16_000  # samples per second of its input
_ENGINES = {"silero": Silero, "energy": Energy}


@dataclass(frozen=True)
class ActivityState:
    """Memory of the detector for each stream, and the begun window `[B, r]`."""

    memory: Any
    begun: Tensor


class VoiceActivity:
    """A `Stage`: pcm `[B, n]` at 16 kHz in, probabilities of speech `[B, t]` per 512 samples out.

    Any split gives the same figures; NaN and infinite samples are silence. The engine "silero"
    takes about 0.5 ms a window; "energy" takes any loud noise for speech and must be asked for.
    """

    rate, window = RATE, WINDOW

    def __init__(self, engine: str = "silero") -> None:
        if engine not in _ENGINES:
            raise SpecError(unknown("engine", engine, _ENGINES))
        self._engine: Any = _ENGINES[engine]()
        self.engine = engine

    def start(self, batch: int = 1) -> ActivityState:
        """Return the state of streams without input."""
        return ActivityState(self._engine.start(batch), torch.zeros(batch, 0))

    def step(self, state: ActivityState, chunk: Tensor) -> tuple[ActivityState, Tensor]:
        """Add samples `[B, n]`; return a probability per completed window, `[B, t]`."""
        clean = torch.nan_to_num(chunk.detach().float().cpu(), posinf=0.0, neginf=0.0)
        samples = torch.cat([state.begun, clean.clamp(-1.0, 1.0)], dim=1)
        memory, voices = state.memory, []
        whole = samples.shape[1] // WINDOW * WINDOW
        for window in samples[:, :whole].split(WINDOW, dim=1) if whole else ():
            memory, voice = self._engine.step(memory, window)
            voices.append(voice)
        out = torch.stack(voices, dim=1) if voices else samples.new_zeros(len(samples), 0)
        return ActivityState(memory, samples[:, whole:].clone()), out

    def finish(self, state: ActivityState) -> Tensor:
        """Return `[B, 0]`: the begun window is not judged."""
        return state.begun.new_zeros(state.begun.shape[0], 0)

    def reset(self, state: ActivityState, rows: Tensor) -> ActivityState:
        """Start streams `rows` (`[B]` bool) anew; the others have to be between two windows."""
        if bool(rows.all()):
            return self.start(len(rows))
        if state.begun.shape[1]:
            raise MmfastError(
                f"{state.begun.shape[1]} samples of a window of {WINDOW} are pending: reset single "
                f"streams of a batch after whole windows, or keep one state per stream"
            )
        return replace(state, memory=self._engine.reset(state.memory, rows))


@dataclass(frozen=True)
class SpeechGateState:
    """State of speech: speaking or not, and the samples since which it is loud or quiet."""

    speaking: bool = False
    loud_from: int | None = None
    quiet_from: int | None = None


@dataclass(frozen=True)
class Gate:
    """Begin and end of speech from probabilities."""

    threshold: float = 0.5  # probability from which a window is speech
    exit: float = 0.35  # below it speech may have ended; between them nothing changes
    speech: int = WINDOW  # samples of speech in a row that begin speech
    silence: int = RATE // 2  # samples of silence in a row that end it

    def __post_init__(self) -> None:
        if not 0.0 < self.exit <= self.threshold < 1.0:
            raise SpecError(
                f"threshold={self.threshold:g}, exit={self.exit:g}: give 0 < exit <= threshold < 1"
            )
        if self.speech < 0 or self.silence < 0:
            raise SpecError(f"speech={self.speech}, silence={self.silence}: give 0 or more")

    def step(
        self, state: SpeechGateState, voice: float, end: int
    ) -> tuple[SpeechGateState, Literal["", "start", "stop"]]:
        """Judge the window that ends before sample `end`; return a begin or end of speech."""
        begin = end - WINDOW
        if not state.speaking:
            loud_from = None
            if voice >= self.threshold:
                loud_from = begin if state.loud_from is None else state.loud_from
            begun = loud_from is not None and end - loud_from >= self.speech
            return SpeechGateState(begun, loud_from), "start" if begun else ""
        quiet_from = state.quiet_from
        if voice >= self.threshold:
            quiet_from = None
        elif quiet_from is None and voice < self.exit:
            quiet_from = begin
        if quiet_from is not None and end - quiet_from >= self.silence:
            return SpeechGateState(False, None, quiet_from), "stop"
        return SpeechGateState(True, state.loud_from, quiet_from), ""
