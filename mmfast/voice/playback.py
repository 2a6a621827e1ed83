"""The clock of a loudspeaker: how much of a reply has sounded, and where it ran dry."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.speech import Sound
from mmfast.ops.audio import RATE, Resampler
from mmfast.streams.stream import Clock


class Playback:
    """Counts samples of one reply that a loudspeaker has played.

    It begins `delay` seconds after the first sound arrives, as a buffer against gaps, plays without
    pause while there is some, and waits where there is none. `gaps` counts how often it ran dry
    between two pieces; `silent` and `longest` are seconds of them all and of the longest.
    """

    def __init__(self, clock: Clock, rate: int, delay: float = 0.0) -> None:
        self.rate, self.arrived = rate, 0
        self.gaps, self.silent, self.longest = 0, 0.0, 0.0
        self._clock, self._delay = clock, delay
        self._from: float | None = None  # when the sample `_base` was due
        self._base = 0
        self._ended: int | None = None

    def add(self, samples: int) -> None:
        """Take samples that arrive now."""
        if samples <= 0 or self._ended is not None:
            return
        now = self._clock.now()
        if self._from is None:
            self._from = now + self._delay
        elif (dry := now - self.dry_at()) > 1e-9:
            self.gaps, self.silent = self.gaps + 1, self.silent + dry
            self.longest = max(self.longest, dry)
            self._from, self._base = now, self.arrived
        self.arrived += samples

    def played(self) -> int:
        """Samples that have sounded; never more than have arrived."""
        if self._ended is not None:
            return self._ended
        if self._from is None:
            return 0
        # a clock adds up rounded steps: a sample that is due to a millionth of a sample is due
        due = int((self._clock.now() - self._from) * self.rate + 1e-6)
        return min(self._base + max(due, 0), self.arrived)

    def dry_at(self) -> float:
        """Return the time at which all that has arrived will have sounded; now without any."""
        if self._from is None:
            return self._clock.now()
        return self._from + (self.arrived - self._base) / self.rate

    def stop(self) -> int:
        """Be silent from now on; returns the samples that have sounded."""
        self._ended = self.played()
        return self._ended


_SLACK = 32  # samples at 16 kHz by which the sound that was played is late: pieces differ by one


class PlayedSound:
    """The sound of replies as a loudspeaker plays it, beside that of a microphone at 16 kHz."""

    def __init__(self) -> None:
        self._playback: Playback | None = None
        self._pcm, self._done = torch.zeros(0), 0  # what is not played yet, from sample `_done` on
        self._ready = torch.zeros(0)  # at 16 kHz

    def add(self, playback: Playback, pcm: Tensor) -> None:
        """Take the next piece of a reply, which has not been played."""
        if playback is not self._playback:
            self._playback, self._pcm, self._done = playback, torch.zeros(0), 0
            self._resampler = Resampler(playback.rate, RATE)
            self._state = self._resampler.start()
        self._pcm = torch.cat([self._pcm, pcm.detach().float().cpu()])

    def take(self, playback: Playback | None, samples: int) -> Tensor:
        """Return the last `samples` at 16 kHz that were played, zeros where it was silent."""
        if playback is not None and playback is self._playback:
            new = playback.played() - self._done
            self._state, out = self._resampler.step(self._state, self._pcm[None, :new])
            self._pcm, self._done = self._pcm[new:], self._done + new
            if not len(self._ready) and out.shape[-1]:
                self._ready = torch.zeros(max(0, samples - out.shape[-1]) + _SLACK)
            self._ready = torch.cat([self._ready, out[0]])
        taken, self._ready = self._ready[:samples], self._ready[samples:]
        return F.pad(taken, (0, samples - len(taken)))


KEPT = 512  # latencies of so many replies are kept for the quantiles


class ReplyMeter:
    """Figures of one reply, or of one text that is said.

    Time counts from the moment it was made: that is when the question was over. `now` tells seconds
    of work, not those of a simulated conversation.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self._asked, self.work, self.samples, self.rate = now(), 0.0, 0, 0
        self.first_text_ms: float | None = None
        self.first_audio_ms: float | None = None
        self.heard_ms: float | None = None
        self.counts: Counter[str] = Counter()
        self.drafted: list[int] = []  # per codebook
        self.accepted: list[int] = []
        self.spelled: list[str] = []  # words that the model does not know, letter by letter
        self.left_out: list[str] = []  # what it cannot say

    def pull(self, sounds: Iterator[Sound]) -> Sound | None:
        """The next piece, its making timed; None at the end."""
        start = self.now()
        sound = next(sounds, None)
        end = self.now()
        self.work += end - start
        if sound is not None:
            self.add(sound, 1e3 * (end - self._asked))
        return sound

    def add(self, sound: Sound, ms: float) -> None:
        """Count a piece that came after so many milliseconds."""
        self.samples, self.rate = self.samples + len(sound.pcm), sound.rate
        self.counts.update(tokens=sound.tokens, passes=sound.passes, drafts=sound.drafts)
        if sound.heard is not None and self.heard_ms is None:
            self.heard_ms = ms
        if sound.text and self.first_text_ms is None:
            self.first_text_ms = ms
        if len(sound.pcm) and self.first_audio_ms is None:
            self.first_audio_ms = ms
        _add_each(self.drafted, sound.notes.get("drafted", ()))
        _add_each(self.accepted, sound.notes.get("accepted", ()))
        self.spelled += sound.notes.get("spelled", ())
        self.left_out += sound.notes.get("left_out", ())

    def timed(self, sounds: Iterable[Sound]) -> Iterator[Sound]:
        """The pieces as they come, each of them counted."""
        source = iter(sounds)
        try:
            while (sound := self.pull(source)) is not None:
                yield sound
        finally:
            close = getattr(source, "close", None)
            if close is not None:  # a listener that stops, stops the model
                close()

    @property
    def seconds(self) -> float:
        """Of sound."""
        return self.samples / self.rate if self.rate else 0.0

    def stats(self) -> dict[str, Any]:
        """Figures as plain numbers; None where there is nothing to divide by.

        `rtf` is seconds of work a second of sound, `acceptance` the share of drafts accepted, one
        number a codebook; `spelled` and `left_out`, where there are any, words that the model does
        not know, and what it cannot say.
        """
        tokens, passes = self.counts["tokens"], self.counts["passes"]
        shares = zip(self.accepted, self.drafted, strict=False)
        return {
            "seconds": round(self.seconds, 4),
            "heard_ms": _rounded(self.heard_ms),
            "first_text_ms": _rounded(self.first_text_ms),
            "first_audio_ms": _rounded(self.first_audio_ms),
            "work_ms": _rounded(1e3 * self.work),
            "rtf": _rounded(self.work / self.seconds if self.seconds else None),
            "tokens": tokens,
            "passes": passes,
            "draft_passes": self.counts["drafts"],
            "tokens_per_pass": _rounded(tokens / passes if passes else None),
            "tokens_per_second": _rounded(tokens / self.work if tokens and self.work else None),
            "acceptance": [_rounded(a / d if d else None) for a, d in shares],
            **({"spelled": self.spelled} if self.spelled else {}),
            **({"left_out": self.left_out} if self.left_out else {}),
        }


class Totals:
    """Figures of a conversation: sums, and quantiles of what a listener waits for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.work, self.seconds = 0.0, 0.0
        self._first: deque[float] = deque(maxlen=KEPT)
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, meter: ReplyMeter) -> None:
        """A reply that is over."""
        self.counts.update(meter.counts)
        self.work += meter.work
        self.seconds += meter.seconds
        if meter.first_audio_ms is not None:
            self._first.append(meter.first_audio_ms)
        _add_each(self._drafted, meter.drafted)
        _add_each(self._accepted, meter.accepted)

    def stats(self) -> dict[str, Any]:
        """As `ReplyMeter.stats`, of all replies; first sound as quantiles of the last 512."""
        both = ReplyMeter()
        both.counts, both.work = self.counts, self.work
        both.samples, both.rate = round(1e6 * self.seconds), 1_000_000
        both.drafted, both.accepted = self._drafted, self._accepted
        found = both.stats()
        for name in ("heard_ms", "first_text_ms", "first_audio_ms"):
            del found[name]
        spread = _spread(sorted(self._first))
        return {**found, **{f"first_audio_ms_{name}": value for name, value in spread.items()}}


def _spread(values: list[float]) -> dict[str, float | None]:
    if len(values) < 2:
        only = _rounded(values[0]) if values else None
        return {"p50": only, "p95": only, "max": only}
    cuts = quantiles(values, n=20, method="inclusive")
    return {"p50": _rounded(cuts[9]), "p95": _rounded(cuts[18]), "max": _rounded(values[-1])}


def _add_each(sums: list[int], more: int | Iterable[int]) -> None:
    """Add numbers per codebook; one number alone is that of the only codebook."""
    for index, value in enumerate([more] if isinstance(more, int) else more):
        if index == len(sums):
            sums.append(0)
        sums[index] += int(value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
