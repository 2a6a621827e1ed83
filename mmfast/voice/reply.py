"""One reply: made piece by piece, played by a clock, cut off at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mmfast.core.speech import Sound
from mmfast.streams.stream import Clock
from mmfast.voice.history import Alignment, HistoryTurn
from mmfast.voice.playback import Playback, ReplyMeter


class ReplyRun:
    """A reply on its way.

    Args:
        id: Its name.
        item: The item of the conversation that it fills.
        make: Begins to make it; called when the first piece is wanted, outside of all locks.
        question: The item that it answers; it gets the text that was understood.

    Attributes:
        over: No more pieces come: it was made in full, cancelled, or it failed.
        busy: A thread makes a piece just now.
    """

    def __init__(
        self,
        id: str,
        item: HistoryTurn,
        make: Callable[[], Iterator[Sound]],
        question: HistoryTurn | None = None,
    ) -> None:
        self.id, self.item, self.question = id, item, question
        self.words, self.playback = Alignment(), None
        item.words = self.words
        self.meter = ReplyMeter()
        self.over = self.busy = False
        self._sounds = _begun(make)

    playback: Playback | None

    def pull(self) -> Sound | None:
        """The next piece, or None at the end; takes as long as the model does."""
        return self.meter.pull(self._sounds)

    def take(self, sound: Sound, clock: Clock, delay: float) -> None:
        """Note a piece that came."""
        if sound.heard is not None and self.question is not None:
            self.question.said, self.question.understood = sound.heard.strip(), True
        if self.playback is None:
            self.playback = self.item.playback = Playback(clock, sound.rate, delay)
        self.words.add(sound)

    def end(self) -> None:
        """Nothing more is wanted of it; a thread that makes a piece just now closes it after."""
        self.over = True
        if not self.busy:
            self.close()

    def close(self) -> None:
        """Stop the model."""
        self._sounds.close()  # type: ignore[attr-defined]

    @property
    def waiting(self) -> int:
        """Samples that are made and not played."""
        return 0 if self.playback is None else self.words.samples - self.playback.played()

    @property
    def lead(self) -> float:
        """Seconds that are made and not played."""
        return self.waiting / self.words.rate

    def stats(self) -> dict[str, Any]:
        """What it cost so far, and how it was played."""
        found, playback = self.meter.stats(), self.playback
        if playback is None:
            return {**found, "gaps": 0, "gap_ms": 0.0, "longest_gap_ms": 0.0}
        gaps = {"gap_ms": 1e3 * playback.silent, "longest_gap_ms": 1e3 * playback.longest}
        return {
            **found,
            "gaps": playback.gaps,
            **{name: round(value, 3) for name, value in gaps.items()},
        }


def _begun(make: Callable[[], Iterator[Sound]]) -> Iterator[Sound]:
    """Beginning may cost as much as a piece, so it waits for the first `next`."""
    yield from make()
