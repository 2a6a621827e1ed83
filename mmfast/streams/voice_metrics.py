"""What a reply costs: first sound, real-time factor, tokens, passes, acceptance, gaps."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from statistics import quantiles
from typing import Any

from mmfast.core.speech import Sound

KEPT = 512  # latencies of so many replies are kept for the quantiles


class Meter:
    """Figures of one reply, or of one text that is said.

    Time counts from the moment it was made: that is when the question was over.

    Args:
        now: Tells seconds of work, not those of a simulated conversation.
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

    def timed(self, sounds: Iterable[Sound]) -> Iterator[Sound]:
        """The pieces as they come, each of them counted."""
        source = iter(sounds)
        try:
            while (sound := self.pull(source)) is not None:
                yield sound
        finally:
            close = getattr(source, "close", None)
            if close is not None:  # whoever stops listening stops the model
                close()

    @property
    def seconds(self) -> float:
        """Of sound."""
        return self.samples / self.rate if self.rate else 0.0

    def stats(self) -> dict[str, Any]:
        """Figures as plain numbers; None where there is nothing to divide by.

        `rtf` is seconds of work a second of sound, `acceptance` the share of drafts accepted,
        one number a codebook.
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
        }


class Totals:
    """Figures of a conversation: sums, and quantiles of what a listener waits for."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.work, self.seconds = 0.0, 0.0
        self._first: deque[float] = deque(maxlen=KEPT)
        self._drafted: list[int] = []
        self._accepted: list[int] = []

    def add(self, meter: Meter) -> None:
        """A reply that is over."""
        self.counts.update(meter.counts)
        self.work += meter.work
        self.seconds += meter.seconds
        if meter.first_audio_ms is not None:
            self._first.append(meter.first_audio_ms)
        _add_each(self._drafted, meter.drafted)
        _add_each(self._accepted, meter.accepted)

    def stats(self) -> dict[str, Any]:
        """As `Meter.stats`, of all replies; first sound as quantiles of the last 512."""
        both = Meter()
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
