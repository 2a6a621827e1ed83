"""One reply: made piece by piece, played by a clock, cut off at any moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from mmfast.core.speech import Sound
from mmfast.streams.stream import Clock
from mmfast.voice.history import Alignment, HistoryTurn
from mmfast.voice.playback import Playback, ReplyMeter


class SpokenReply:
    """A reply on its way.

    It fills the item `item` and answers the item `question`, which gets the text that was
    understood. `make` begins to make it; it is called for the first piece, outside of all locks.
    `over`: no more pieces come, as it was made in full, cancelled, or it failed. `busy`: a thread
    makes a piece just now.
    """

    playback: Playback | None

    def __init__(
        self,
        id: str,
        item: HistoryTurn,
        make: Callable[[], Iterator[Sound]] | None = None,
        question: HistoryTurn | None = None,
    ) -> None:
        self.id, self.item, self.make, self.question = id, item, make, question
        self.words, self.playback = Alignment(), None
        item.words = self.words
        self.meter = ReplyMeter()
        self.over = self.busy = False
        self._sounds = self._begin()

    def _begin(self) -> Iterator[Sound]:
        # beginning may cost as much as a piece, so it waits for the first `next`
        if self.make is not None:
            yield from self.make()

    def pull(self) -> Sound | None:
        """Return the next piece, or None at the end; takes as long as the model does."""
        return self.meter.pull(self._sounds)

    def take(self, sound: Sound, clock: Clock, delay: float) -> None:
        """Note a piece that came."""
        if self.playback is None:
            self.playback = self.item.playback = Playback(clock, sound.rate, delay)
        self.words.add(sound)

    def settle(self) -> None:
        """Stop the sound: the context keeps the words that were heard."""
        if self.item.words is not None:
            self.item.settle(0 if self.playback is None else self.playback.stop())

    def end(self) -> None:
        """Want no more pieces; a thread that makes one just now closes the model after it."""
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

    def due_at(self, ahead: float) -> float | None:
        """Return when its next piece is due, `ahead` seconds before the sound runs dry.

        None: only an event changes that, because nothing has been made or fetched yet.
        """
        if self.over or self.busy or self.playback is None:
            return None
        pending = self.words.samples - self.playback.arrived
        return None if pending > 0 else self.playback.dry_at() - ahead + 1e-3

    def stats(self) -> dict[str, Any]:
        """Return what it cost so far, and how it was played."""
        played = self.playback
        gaps = (0, 0.0, 0.0) if played is None else (played.gaps, played.silent, played.longest)
        found = {**self.meter.stats(), "gaps": gaps[0]}
        return {
            **found,
            "gap_ms": round(1e3 * gaps[1], 3),
            "longest_gap_ms": round(1e3 * gaps[2], 3),
        }
