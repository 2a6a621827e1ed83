"""What turn detection tells, and what it remembers of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor

from mmfast.frontends.voice_activity import RATE, ActivityState, GateState

Kind = Literal["speech_started", "sound", "speech_stopped", "turn", "timeout"]
Reason = Literal["", "silence", "length", "commit", "end"]


@dataclass(frozen=True)
class TurnEvent:
    """Something that happened in the stream; times in ms count from the start of the session.

    Attributes:
        kind: "speech_started" (somebody begins), "sound" (what a turn goes on with, where asked
            for), "speech_stopped" (has ended), "turn" (here is what was said), "timeout" (nobody
            says anything).
        at_ms: When it became known; `at_ms - start_ms` or `- stop_ms` is what detection took.
        start_ms: Where the turn begins, padding included; of a timeout, where waiting began.
        stop_ms: Where its sound ends so far; of "speech_stopped", the silence that proved it
            included.
        speech_ms: Of "speech_stopped": where the last word ended.
        pcm: Samples `[n]`: of "speech_started" what the turn holds up to now, of "sound" what came
            since, of "turn" all of it, trailing silence cut to the padding.
        reason: Of "turn": "silence", "length" (it grew too long; it goes on unless a
            "speech_stopped" came before), "commit" (asked for), "end" (the stream is over).
    """

    kind: Kind
    at_ms: int
    start_ms: int
    stop_ms: int
    speech_ms: int = 0
    pcm: Tensor | None = field(default=None, compare=False, repr=False)
    reason: Reason = ""


@dataclass(frozen=True)
class TurnState:
    """A stream up to now; a value.

    Attributes:
        activity: The detector's memory.
        gate: Whether somebody speaks.
        kept: Samples of the turn, or those that may become its beginning, in windows.
        kept_from: Number of the first of them.
        heard: Samples judged so far.
        begun: Those behind them `[r]`, less than a window.
        waiting_from: Since which sample nobody says anything; None when it was said already.
    """

    activity: ActivityState
    gate: GateState
    kept: tuple[Tensor, ...]
    kept_from: int
    heard: int
    begun: Tensor
    waiting_from: int | None = 0


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
