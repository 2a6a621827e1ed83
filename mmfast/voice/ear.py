"""Detectors of turns: the places where speech begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mmfast.core.errors import SpecError, unknown
from mmfast.frontends.audio.turns import TurnCutter, TurnEvent
from mmfast.models.speech.turn_end import (
    SILENCES,
    Overheard,
    TurnEnd,
    finished,
    is_backchannel,
    load_turn_end,
)

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

    def keep(self, most: int) -> None:
        """Forget the oldest sound beyond so many samples."""
        while self.held > most:
            self.held -= len(self._parts.pop(0))

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

    def utterance(self) -> tuple[Tensor, int, int] | None:
        """Return a turn that goes on so far, and its samples of speech and of silence behind it."""
        gate, heard = self._state.gate, self._state.heard
        if not gate.speaking or gate.loud_from is None:
            return None
        spoken = heard if gate.quiet_from is None else gate.quiet_from
        return torch.cat(self._state.kept), spoken - gate.loud_from, heard - spoken


# Milliseconds of silence that end a turn: of a whole sentence, where that is unclear, and of one
# that breaks off. The last are the most that OpenAI names for these words.
EAGERNESS = {
    "low": (600, 2000, 8000),
    "medium": (400, 1200, 4000),
    "auto": (400, 1200, 4000),
    "high": (250, 600, 2000),
}


class SemanticEar(VoiceEar):
    """Finds turns by what was said so far, so that a pause in a sentence cuts nobody off.

    `hears` writes speech `[n]` down, None judges by silence alone. `eagerness` is one of
    `EAGERNESS`, else SpecError; `options` are those of `VoiceEar`.
    """

    def __init__(
        self,
        eagerness: str = "auto",
        hears: Callable[[Tensor], Overheard] | None = None,
        **options: Any,
    ) -> None:
        if eagerness not in EAGERNESS:
            raise SpecError(unknown("eagerness", eagerness, EAGERNESS))
        self.hears, self._times = hears, EAGERNESS[eagerness]
        options = {"silence_duration_ms": self._times[0], **options}
        super().__init__(patience=self._patience, **options)

    def _patience(self, pcm: Tensor) -> int:
        said = None if self.hears is None else self.hears(pcm)
        whole = None if said is None else finished(said.text, said.sure)
        return self._times[{True: 0, None: 1, False: 2}[whole]]


# Score of an end that ends a turn after the shortest silence, and after a longer one: an evident
# end is scored high at once, and a score that only grows with the silence is mostly a pause's.
# Then the milliseconds of silence that end a turn in any case.
CERTAINTY = {
    "low": (0.993, 0.993, 4000),
    "medium": (0.97, 0.99, 2000),
    "auto": (0.97, 0.99, 2000),
    "high": (0.9, 0.9, 1300),
}


class ProsodyEar(SemanticEar):
    """Finds turns by how they sound, and by what was said where `hears` writes it down.

    A small network reads pitch, energy and spectrum of the 1.6 s before a silence and scores for
    each length of the silence how likely the turn is over; the ear waits for the score of its
    `eagerness`. `ends` are the networks, None the embedded ones (ModelError where they are
    missing); else as `SemanticEar`.
    """

    def __init__(
        self,
        eagerness: str = "auto",
        hears: Callable[[Tensor], Overheard] | None = None,
        ends: TurnEnd | None = None,
        **options: Any,
    ) -> None:
        super().__init__(eagerness, hears, **{"silence_duration_ms": SILENCES[0], **options})
        self._ends = load_turn_end() if ends is None else ends
        *self._wanted, self._most = CERTAINTY[eagerness]

    def _patience(self, pcm: Tensor) -> int:
        said = None if self.hears is None else self.hears(pcm)
        return self._ends.patience(pcm, said, self._wanted, self._most)


MURMUR = 0.7  # score from which a short sound is taken for a backchannel
AGREED = 0.4  # what it gains where the words are those of one


class MurmurEar:
    """Tells a backchannel, such as "mhm" or "okay", from a short call for the floor.

    `hears` writes speech `[n]` down, None judges by its sound alone; `ends` as of `ProsodyEar`.
    """

    def __init__(
        self,
        hears: Callable[[Tensor], Overheard] | None = None,
        ends: TurnEnd | None = None,
    ) -> None:
        self.hears, self._ends = hears, load_turn_end() if ends is None else ends

    def __call__(self, pcm: Tensor) -> str | None:
        """Return the words of a backchannel `[n]`, "" where nobody knows them; None: it is none."""
        text = "" if self.hears is None else self.hears(pcm).text
        known = is_backchannel(text)
        score = self._ends.murmur(pcm) + AGREED * known
        return (text if known else "") if score >= MURMUR else None


def overhear(listener: Any, pcm: Tensor) -> Overheard:
    """Return speech `[n]` written down, with what else the listener knows of it."""
    if hasattr(listener, "overhear"):
        found: Overheard = listener.overhear(pcm, RATE)
        return found
    return Overheard(str(listener.transcribe(pcm, RATE)))


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
