"""Detectors of turns: the places where speech begins and ends."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from mmfast.core.errors import SpecError, unknown
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


# Milliseconds of silence that end a turn: of a whole sentence, where that is unclear, and of one
# that breaks off. The last are the most that OpenAI names for these words.
EAGERNESS = {
    "low": (600, 2000, 8000),
    "medium": (400, 1200, 4000),
    "auto": (400, 1200, 4000),
    "high": (250, 600, 2000),
}
# Probability of the last words, below which the ear has guessed them, and above which it has not.
GUESSED, SURE = 0.8, 0.95


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that end no English sentence; that end one only behind a question word, as "where are you
# from" does; or behind one further in, or yes or no, as "tell me what it is" does; and words that
# are an answer alone.
_OPEN = _words(
    """
    a an the my your his its our their every and or nor but because although while if unless
    until than as very really quite um uh er erm hmm which what's where's i'm i'd i'll i've
    """
)
_STRANDED = _words(
    """
    of to at from into onto with without for by between about near behind beside above below under
    around i we they he she want wants need needs this these like be been being
    """
)
_AUXILIARY = _words(
    """
    is are was were am do does did has have had will would can could should shall may might must
    """
)
_ASKING = _words("what which who whom whose where when why how")
_ALONE = _words(
    """
    yes no yeah yep nope okay ok sure right stop wait go thanks thank hello hi hey bye goodbye
    please sorry continue cancel repeat again help
    """
)


def finished(text: str, sure: float = 1.0) -> bool | None:
    """Tell whether a sentence as it was heard so far is whole; None where that is unclear.

    `sure` is the probability of its last words: an ear that has learned whole sentences guesses the
    end of one that breaks off. A sentence in another language than English is judged by its marks
    and its length alone.
    """
    words, end = re.findall(r"[\w']+", text.lower()), text.rstrip()[-1:]
    if not words:
        return None
    last, asking = words[-1], [n for n, word in enumerate(words) if word in _ASKING]
    wished = words[-2:] in (["would", "like"], ["i'd", "like"])
    if (
        sure < GUESSED
        or end in ",:;-\u2013\u2014\u2026"
        or text.rstrip().endswith("..")
        or last in _OPEN
        or wished
    ):
        return False
    if last in _STRANDED and not asking:
        return False
    if last in _STRANDED and end != "?":
        return None
    if last in _AUXILIARY:
        return None if words[0] in ("yes", "no") or asking[-1:] > [0] else False
    if sure < SURE:
        return None
    if end in ".?!\u3002\uff1f\uff01" or (len(words) <= 2 and words[0] in _ALONE):
        return True
    return True if len(words) > 2 else None


class SemanticEar(VoiceEar):
    """Finds turns by what was said so far, so that a pause in a sentence cuts nobody off.

    `hears` writes speech `[n]` down, with the probability of the last words; None judges by silence
    alone. `eagerness` is one of `EAGERNESS`, else SpecError; `options` are those of `VoiceEar`.
    """

    def __init__(
        self,
        eagerness: str = "auto",
        hears: Callable[[Tensor], tuple[str, float]] | None = None,
        **options: Any,
    ) -> None:
        if eagerness not in EAGERNESS:
            raise SpecError(unknown("eagerness", eagerness, EAGERNESS))
        self.hears, self._times = hears, EAGERNESS[eagerness]
        options = {"silence_duration_ms": self._times[0], **options}
        super().__init__(patience=self._patience, **options)

    def _patience(self, pcm: Tensor) -> int:
        whole = None if self.hears is None else finished(*self.hears(pcm))
        return self._times[{True: 0, None: 1, False: 2}[whole]]


def overhear(listener: Any, pcm: Tensor) -> tuple[str, float]:
    """Return speech `[n]` written down, and the probability of its last words where it is known."""
    if hasattr(listener, "overhear"):
        text, sure = listener.overhear(pcm, RATE)
        return str(text), float(sure)
    return str(listener.transcribe(pcm, RATE)), 1.0


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
