"""Turns of a conversation by voice activity, as the ear of one."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmfast.frontends.turn_detection import TurnEvent, Turns
from mmfast.streams.voice_ear import RATE, Heard


class VoiceEar:
    """Finds turns with silero-vad, or another detector.

    Args:
        **options: `threshold`, `silence_duration_ms`, `prefix_padding_ms`, `max_turn_ms`,
            `idle_timeout_ms` and so on; see `mmfast.frontends.turn_detection.Turns`.

    Raises:
        ModelError: silero-vad is not installed.
        SpecError: A value out of range.
    """

    def __init__(self, **options: Any) -> None:
        self._turns = Turns(**options)
        self._state = self._turns.start()

    def hear(self, pcm: Tensor) -> list[Heard]:
        """The next samples `[n]`."""
        self._state, events = self._turns.step(self._state, pcm)
        return _heard(events)

    def flush(self) -> list[Heard]:
        """End a turn that goes on."""
        self._state, events = self._turns.commit(self._state)
        return _heard(events)

    def clear(self) -> None:
        """Forget a turn that goes on."""
        self._state, _ = self._turns.commit(self._state)


def _heard(events: list[TurnEvent]) -> list[Heard]:
    found, before = [], ""
    for event in events:
        if event.kind == "speech_started":
            found.append(Heard("started", event.start_ms * RATE // 1000))
        elif event.kind == "timeout":
            found.append(Heard("timeout", event.at_ms * RATE // 1000))
        elif event.kind == "turn":
            at = event.stop_ms * RATE // 1000
            found.append(Heard("stopped", at, event.pcm))
            if event.reason == "length" and before != "speech_stopped":
                found.append(Heard("started", at))  # he still speaks: not to be spoken over
        before = event.kind
    return found
