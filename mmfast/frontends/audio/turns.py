"""Turns of a conversation in a stream of sound: their begin, their end and their samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.frontends.audio.activity import (
    RATE,
    WINDOW,
    ActivityState,
    Gate,
    SpeechGateState,
    VoiceActivity,
)

Kind = Literal["speech_started", "sound", "speech_stopped", "turn", "timeout"]
Reason = Literal["", "silence", "length", "commit", "end"]


@dataclass(frozen=True)
class TurnEvent:
    """Event in the stream; times in ms count from the start of the session.

    Its samples `[n]` are those of the turn so far ("speech_started"), since then ("sound"), or all
    of it, trailing silence cut to the padding ("turn").
    """

    kind: Kind  # "sound": samples of a turn, if requested; "timeout": silence for too long
    at_ms: int  # time of detection; `at_ms - start_ms` or `- stop_ms` is its delay
    start_ms: int  # start of the turn, padding included; of a timeout, start of the wait
    stop_ms: int  # end of its sound so far; of "speech_stopped" with the silence that proved it
    speech_ms: int = 0  # of "speech_stopped": end of the last word
    pcm: Tensor | None = field(default=None, compare=False, repr=False)
    reason: Reason = ""  # of "turn"; after "length" it continues unless a "speech_stopped" came


@dataclass(frozen=True)
class TurnState:
    """State of a stream, a value."""

    activity: ActivityState  # the detector's memory
    gate: SpeechGateState  # state of speech
    kept: tuple[Tensor, ...]  # samples of the turn, or those that may become its beginning
    kept_from: int  # number of the first of them
    heard: int  # samples judged so far
    begun: Tensor  # samples after them `[r]`, less than a window
    waiting_from: int | None = 0  # sample at which the wait for speech began; None outside of one
    pause: tuple[int, int] = (-1, 0)  # first sample of the last silence judged, and its patience


def cut(state: TurnState, first: int) -> TurnState:
    """Keep samples from number `first` on."""
    kept, at = list(state.kept), state.kept_from
    while kept and at + len(kept[0]) <= first:
        at += len(kept.pop(0))
    if kept and at < first:
        kept[0] = kept[0][first - at :].clone()
    return replace(state, kept=tuple(kept), kept_from=first)


def to_samples(ms: int) -> int:
    """Milliseconds to samples."""
    return ms * RATE // 1000


def to_ms(samples: int) -> int:
    """Samples to milliseconds."""
    return samples * 1000 // RATE


class TurnCutter:
    """Cutter of one stream into turns; like a `Stage`, any split gives the same events.

    Sound is 16 kHz mono; events are known at the end of a window of 32 ms. A window is speech from
    `threshold` on, and silent below `exit`. `speech_ms` in a row begin a turn (0: one window),
    `silence_duration_ms` end it; it has `prefix_padding_ms` more sound in front, since an onset is
    quiet, and `padding_ms` after its last word, and is cut at `max_turn_ms`. A wait of
    `idle_timeout_ms` causes one "timeout". Without `detect` all sound belongs to the turn, which
    only `commit` and its length end. With `sound` it comes in "sound" events of one window, too.

    `patience` gets the samples `[n]` of a turn at each silence of `silence_duration_ms`, and
    returns the milliseconds of silence that end the turn: for those who pause to think.
    """

    rate = RATE

    def __init__(
        self,
        threshold: float = 0.5,
        exit: float = 0.35,
        speech_ms: int = 0,
        silence_duration_ms: int = 500,
        prefix_padding_ms: int = 300,
        padding_ms: int = 100,
        max_turn_ms: int = 60_000,
        idle_timeout_ms: int | None = None,
        detect: bool = True,
        sound: bool = False,
        activity: VoiceActivity | None = None,
        patience: Callable[[Tensor], int] | None = None,
    ) -> None:
        times = {
            "speech_ms": (speech_ms, 0),
            "silence_duration_ms": (silence_duration_ms, 0),
            "prefix_padding_ms": (prefix_padding_ms, 0),
            "padding_ms": (padding_ms, 0),
            "max_turn_ms": (max_turn_ms, 100),
            "idle_timeout_ms": (1 if idle_timeout_ms is None else idle_timeout_ms, 1),
        }
        for name, (value, least) in times.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SpecError(f"{name}={value!r}: give whole milliseconds, {least} or more")
        self._gate = Gate(threshold, exit, to_samples(speech_ms), to_samples(silence_duration_ms))
        self._prefix, self._padding = to_samples(prefix_padding_ms), to_samples(padding_ms)
        self._longest = to_samples(max_turn_ms)
        self._idle = None if idle_timeout_ms is None else to_samples(idle_timeout_ms)
        self._sound, self._patience = sound, patience
        self._activity = (activity or VoiceActivity()) if detect else None

    def start(self) -> TurnState:
        """Return the state of a session without input."""
        activity = self._activity.start() if self._activity else ActivityState(None, torch.zeros(0))
        gate = SpeechGateState(speaking=self._activity is None)
        return TurnState(activity, gate, (), 0, 0, torch.zeros(0))

    def step(self, state: TurnState, chunk: Tensor) -> tuple[TurnState, list[TurnEvent]]:
        """Add samples `[n]`; return the events that they cause."""
        clean = torch.nan_to_num(chunk.detach().float().cpu(), posinf=0.0, neginf=0.0)
        samples = torch.cat([state.begun, clean.clamp(-1.0, 1.0)])
        events: list[TurnEvent] = []
        whole = len(samples) // WINDOW * WINDOW
        state = replace(state, begun=samples[whole:].clone())
        for window in samples[:whole].split(WINDOW) if whole else ():
            state, new = self._judge(state, window.clone())
            events += new
        return state, events

    def commit(self, state: TurnState) -> tuple[TurnState, list[TurnEvent]]:
        """End the turn now, even during speech; outside of a turn nothing happens."""
        whole = self._with_begun(state)
        if not whole.gate.speaking or whole.heard == whole.kept_from:
            return state, []
        turn = self._turn(whole, whole.heard, "commit")
        return self._emptied(whole, whole.heard, SpeechGateState(self._activity is None)), [turn]

    def finish(self, state: TurnState) -> list[TurnEvent]:
        """End the stream; an open turn is complete."""
        state = self._with_begun(state)
        if not state.gate.speaking:
            return []
        if self._activity:
            return self._ended(state, "end")[1]
        return [self._turn(state, state.heard, "end")] if state.heard > state.kept_from else []

    def wait(self, state: TurnState) -> TurnState:
        """Restart the wait for speech, such as after an answer has been played."""
        return replace(state, waiting_from=state.heard)

    def _judge(self, state: TurnState, window: Tensor) -> tuple[TurnState, list[TurnEvent]]:
        state = replace(state, kept=(*state.kept, window), heard=state.heard + WINDOW)
        if self._activity is None:
            return self._bounded(state, self._continued(state, window))
        activity, voice = self._activity.step(state.activity, window[None])
        gate, change = self._gate.step(state.gate, float(voice[0, 0]), state.heard)
        if change == "stop" and self._patience is not None and gate.quiet_from is not None:
            state = self._judged(state, gate.quiet_from, self._patience)
            if state.heard - gate.quiet_from < state.pause[1]:
                gate, change = replace(state.gate, quiet_from=gate.quiet_from), ""
        state = replace(state, activity=activity, gate=gate)
        if change == "start":
            return self._begun(state)
        if change == "stop":
            return self._ended(state, "silence")
        if gate.speaking:
            return self._bounded(state, self._continued(state, window))
        return self._idled(self._trimmed(state))

    def _judged(
        self, state: TurnState, quiet_from: int, patience: Callable[[Tensor], int]
    ) -> TurnState:
        """Ask how long the silence that began at a sample may be, unless it was asked before."""
        if state.pause[0] == quiet_from:
            return state
        stop = min(state.heard, quiet_from + self._padding) - state.kept_from
        pause = quiet_from, to_samples(patience(torch.cat(state.kept)[:stop]))
        return replace(state, pause=pause)

    def _begun(self, state: TurnState) -> tuple[TurnState, list[TurnEvent]]:
        first = max(state.kept_from, (state.gate.loud_from or 0) - self._prefix)
        state = replace(cut(state, first), waiting_from=None)
        pcm = torch.cat(state.kept)
        return self._bounded(state, [self._event("speech_started", state, state.heard, pcm=pcm)])

    def _continued(self, state: TurnState, window: Tensor) -> list[TurnEvent]:
        return [self._event("sound", state, state.heard, pcm=window)] if self._sound else []

    def _ended(self, state: TurnState, reason: Reason) -> tuple[TurnState, list[TurnEvent]]:
        quiet = state.gate.quiet_from
        last = state.heard if quiet is None else quiet
        stopped = self._event("speech_stopped", state, state.heard, speech_ms=to_ms(last))
        stop = min(state.heard, last + self._padding)
        turn = self._turn(state, stop, reason)
        return self._emptied(state, stop, SpeechGateState()), [stopped, turn]

    def _bounded(
        self, state: TurnState, events: list[TurnEvent]
    ) -> tuple[TurnState, list[TurnEvent]]:
        """Cut a turn that is too long; it continues after the cut, or ends in a pause."""
        if state.heard - state.kept_from < self._longest:
            return state, events
        if state.gate.quiet_from is not None:
            state, ended = self._ended(state, "length")
            return state, [*events, *ended]
        turn = self._turn(state, state.heard, "length")
        return cut(state, state.heard), [*events, turn]

    def _idled(self, state: TurnState) -> tuple[TurnState, list[TurnEvent]]:
        since = state.waiting_from
        if self._idle is None or since is None or state.heard - since < self._idle:
            return state, []
        event = TurnEvent("timeout", to_ms(state.heard), to_ms(since), to_ms(state.heard))
        return replace(state, waiting_from=None), [event]

    def _trimmed(self, state: TurnState) -> TurnState:
        needed = state.heard if state.gate.loud_from is None else state.gate.loud_from
        return cut(state, max(state.kept_from, needed - self._prefix))

    def _emptied(self, state: TurnState, stop: int, gate: SpeechGateState) -> TurnState:
        state = replace(cut(state, stop), gate=gate, waiting_from=state.heard)
        return state if self._activity is None else self._trimmed(state)

    def _with_begun(self, state: TurnState) -> TurnState:
        """Add the begun window to the turn; later samples are judged after it."""
        kept = (*state.kept, state.begun) if len(state.begun) else state.kept
        heard = state.heard + len(state.begun)
        return replace(state, kept=kept, heard=heard, begun=state.begun[:0])

    def _event(
        self, kind: Kind, state: TurnState, at: int, speech_ms: int = 0, pcm: Tensor | None = None
    ) -> TurnEvent:
        return TurnEvent(kind, to_ms(at), to_ms(state.kept_from), to_ms(at), speech_ms, pcm)

    def _turn(self, state: TurnState, stop: int, reason: Reason) -> TurnEvent:
        pcm = torch.cat([*state.kept, state.begun[:0]])[: stop - state.kept_from]
        start, end = to_ms(state.kept_from), to_ms(stop)
        return TurnEvent("turn", to_ms(state.heard), start, end, 0, pcm, reason)
