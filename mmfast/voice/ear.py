"""Detectors of turns: the places where speech begins and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mmfast.frontends.audio.turns import TurnCutter, TurnEvent

RATE = 16000
LONGEST = 60.0  # seconds of a turn; then it is taken as it is


@dataclass(frozen=True)
class EarEvent:
    """Beginning or end of a turn of speech, or a long silence.

    `at` is a sample of the input, padding included; `pcm` `[n]` is what was said, at an end.
    """

    kind: Literal["started", "stopped", "timeout"]
    at: int
    pcm: Tensor | None = None


class Ear(Protocol):
    """Finds turns in sound at 16 kHz; any split of it gives the same turns."""

    def hear(self, pcm: Tensor) -> list[EarEvent]:
        """The next samples `[n]`."""

    def flush(self) -> list[EarEvent]:
        """End a turn that goes on, as far as it has come."""

    def clear(self) -> None:
        """Forget a turn that goes on."""


class ManualEar:
    """Take all sound for speech until `flush`, or `longest` seconds: push to talk."""

    def __init__(self, longest: float = LONGEST) -> None:
        self._limit = round(longest * RATE)
        self._parts: list[Tensor] = []
        self.held = self._at = 0

    def hear(self, pcm: Tensor) -> list[EarEvent]:
        """The next samples `[n]`."""
        found: list[EarEvent] = []
        for part in pcm.split(RATE) if len(pcm) else ():
            if not self.held:
                found.append(EarEvent("started", self._at))
            self._parts.append(part)
            self.held, self._at = self.held + len(part), self._at + len(part)
            if self.held >= self._limit:
                found += self.flush()
        return found

    def flush(self) -> list[EarEvent]:
        """End the turn."""
        if not self.held:
            return []
        pcm = torch.cat(self._parts)
        self.clear()
        return [EarEvent("stopped", self._at, pcm)]

    def clear(self) -> None:
        """Forget it."""
        self._parts, self.held = [], 0


class VoiceEar:
    """Finds turns with silero-vad, or another detector.

    `options` are `threshold`, `silence_duration_ms`, `prefix_padding_ms`, `max_turn_ms`,
    `idle_timeout_ms` and so on of `mmfast.frontends.audio.turns.Turns`. ModelError: silero-vad is
    not installed. SpecError: a value out of range.
    """

    def __init__(self, **options: Any) -> None:
        self._turns = TurnCutter(**options)
        self._state = self._turns.start()

    def hear(self, pcm: Tensor) -> list[EarEvent]:
        """The next samples `[n]`."""
        self._state, events = self._turns.step(self._state, pcm)
        return _heard(events)

    def flush(self) -> list[EarEvent]:
        """End a turn that goes on."""
        self._state, events = self._turns.commit(self._state)
        return _heard(events)

    def clear(self) -> None:
        """Forget a turn that goes on."""
        self._state, _ = self._turns.commit(self._state)


def _heard(events: list[TurnEvent]) -> list[EarEvent]:
    found, before = [], ""
    for event in events:
        if event.kind == "speech_started":
            found.append(EarEvent("started", event.start_ms * RATE // 1000))
        elif event.kind == "timeout":
            found.append(EarEvent("timeout", event.at_ms * RATE // 1000))
        elif event.kind == "turn":
            at = event.stop_ms * RATE // 1000
            found.append(EarEvent("stopped", at, event.pcm))
            if event.reason == "length" and before != "speech_stopped":
                found.append(EarEvent("started", at))  # he still speaks: not to be spoken over
        before = event.kind
    return found
