"""Where somebody speaks: a probability per 32 ms, and the spans of speech in a sound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, SpecError, unknown
from mmfast.frontends.energy_voice import Energy
from mmfast.frontends.silero import Silero

RATE = 16_000  # samples per second that it hears
WINDOW = 512  # samples of a decision
_ENGINES = {"silero": Silero, "energy": Energy}


@dataclass(frozen=True)
class ActivityState:
    """What the detector remembers of each stream, and the window begun `[B, r]`."""

    memory: Any
    begun: Tensor


class VoiceActivity:
    """A `Stage`: pcm `[B, n]` at 16 kHz in, probabilities of speech `[B, t]` per 512 samples out.

    Deterministic, and a pure function of state and samples: windows are looked at one by one, so
    any split gives the same figures. Samples that are no numbers count as silence.

    Args:
        engine: "silero" (the network of silero-vad, about 0.5 ms a window), or "energy" (loudness
            above the noise, which takes any loud noise for speech; never chosen by itself).

    Raises:
        ModelError: silero-vad is not installed.
        SpecError: There is no such engine.
    """

    rate, window = RATE, WINDOW

    def __init__(self, engine: str = "silero") -> None:
        if engine not in _ENGINES:
            raise SpecError(unknown("engine", engine, _ENGINES))
        self._engine: Any = _ENGINES[engine]()
        self.engine = engine

    def start(self, batch: int = 1) -> ActivityState:
        """The state of streams that have heard nothing."""
        return ActivityState(self._engine.start(batch), torch.zeros(batch, 0))

    def step(self, state: ActivityState, chunk: Tensor) -> tuple[ActivityState, Tensor]:
        """Add samples `[B, n]`; give a probability for every window they complete `[B, t]`."""
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
        """A window begun is not judged: `[B, 0]`."""
        return state.begun.new_zeros(state.begun.shape[0], 0)

    def reset(self, state: ActivityState, rows: Tensor) -> ActivityState:
        """Start streams `rows` (`[B]` bool) anew; the others go on.

        Raises:
            MmfastError: The others are in the middle of a window, which a batch shares.
        """
        if bool(rows.all()):
            return self.start(len(rows))
        if state.begun.shape[1]:
            raise MmfastError(
                f"{state.begun.shape[1]} samples of a window of {WINDOW} are pending: reset single "
                f"streams of a batch after whole windows, or keep one state per stream"
            )
        return replace(state, memory=self._engine.reset(state.memory, rows))


@dataclass(frozen=True)
class GateState:
    """Whether somebody speaks, since which sample it seems so, and since which it does not."""

    speaking: bool = False
    loud_from: int | None = None
    quiet_from: int | None = None


@dataclass(frozen=True)
class Gate:
    """Turns probabilities into beginnings and ends of speech.

    Args:
        threshold: Probability from which a window is speech.
        exit: Probability below which speech may have ended; what lies between changes nothing.
        speech: Samples of speech in a row that make a beginning.
        silence: Samples without that make an end.
    """

    threshold: float = 0.5
    exit: float = 0.35
    speech: int = WINDOW
    silence: int = RATE // 2

    def __post_init__(self) -> None:
        if not 0.0 < self.exit <= self.threshold < 1.0:
            raise SpecError(
                f"threshold={self.threshold:g}, exit={self.exit:g}: give 0 < exit <= threshold < 1"
            )
        if self.speech < 0 or self.silence < 0:
            raise SpecError(f"speech={self.speech}, silence={self.silence}: give 0 or more")

    def step(
        self, state: GateState, voice: float, end: int
    ) -> tuple[GateState, Literal["", "start", "stop"]]:
        """Judge the window that ends before sample `end`; say whether speech began or ended."""
        begin = end - WINDOW
        if not state.speaking:
            loud_from = None
            if voice >= self.threshold:
                loud_from = begin if state.loud_from is None else state.loud_from
            begun = loud_from is not None and end - loud_from >= self.speech
            return GateState(begun, loud_from), "start" if begun else ""
        quiet_from = state.quiet_from
        if voice >= self.threshold:
            quiet_from = None
        elif quiet_from is None and voice < self.exit:
            quiet_from = begin
        if quiet_from is not None and end - quiet_from >= self.silence:
            return GateState(False, None, quiet_from), "stop"
        return GateState(True, state.loud_from, quiet_from), ""


def speech_spans(
    pcm: Tensor,
    gate: Gate | None = None,
    padding: int = 480,
    activity: VoiceActivity | None = None,
) -> list[tuple[int, int]]:
    """The spans `[start, stop)` of samples in which somebody speaks.

    Args:
        pcm: `[n]` at 16 kHz.
        gate: Thresholds and times; an end after 100 ms of silence when left out.
        padding: Samples added before and behind each span, where the neighbours leave room.
        activity: The detector; silero when left out.

    Raises:
        ModelError: silero-vad is not installed.
    """
    gate = gate or Gate(silence=RATE // 10)
    stage = activity or VoiceActivity()
    _, voices = stage.step(stage.start(), pcm[None])
    state, found, spans = GateState(), [], []
    for number, voice in enumerate(voices[0].tolist(), start=1):
        since = state.loud_from
        state, change = gate.step(state, voice, number * WINDOW)
        if change == "stop":
            found.append((since or 0, state.quiet_from or 0))
    if state.speaking:
        found.append((state.loud_from or 0, state.quiet_from or len(pcm)))
    for at, (first, last) in enumerate(found):
        # Half of a short pause goes to either side.
        before = first - found[at - 1][1] if at else 2 * first
        behind = found[at + 1][0] - last if at + 1 < len(found) else 2 * (len(pcm) - last)
        spans.append((first - min(padding, before // 2), last + min(padding, behind // 2)))
    return spans
