"""Passes of the speech model to pieces of sound with the words that begin in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmfast.core.speech import Codec, Sound
from mmfast.decoding.stats import PassStats, Stats
from mmfast.models.speech.layout import MARKS, SpeechGuide, SpeechLayout


class UtteranceFrames:
    """Collects one utterance; `starts` has the frame at which each group begins.

    A code of the wrong book (unverified drafts) does not shift those behind it: frames begin at
    codes of book 0, and what a frame lacks is taken from the one before.
    """

    def __init__(self, layout: SpeechLayout) -> None:
        self.layout, self.count, self.starts = layout, 0, [0]
        self._open: list[int] = []
        self._before = [0] * layout.books
        self._ready: list[list[int]] = []

    def push(self, token: int) -> None:
        """An audio token, or the end of a group's sound."""
        place = token - self.layout.base
        if place < 0:
            self._close()
            self.starts.append(self.count)
            return
        book, code = divmod(place, self.layout.entries)
        if book == 0:
            self._close()
        if book == len(self._open):
            self._open.append(code)
        if len(self._open) == self.layout.books:
            self._close()

    def _close(self) -> None:
        if self._open:
            self._before = self._open + self._before[len(self._open) :]
            self._ready.append(self._before)
            self.count += 1
            self._open = []

    def take(self) -> Tensor:
        """Whole frames since the last call `[Q, t]`."""
        found = torch.tensor(self._ready, dtype=torch.long).reshape(-1, self.layout.books).T
        self._ready = []
        return found


class SpeakerVoice:
    """One speaker's stream of sound, over all sentences."""

    def __init__(self, layout: SpeechLayout, codec: Codec) -> None:
        self.layout, self.codec = layout, codec
        self._state = codec.decoder.start(1)
        self._samples = 0  # made so far
        self._frames = 0  # of sentences before this one
        self._passes = self._drafts = self._tokens = 0
        self._first = True  # no word has been said
        self._words: list[tuple[int, str]] = []  # sample at which it begins, text; not yet said
        self._own: SpeechGuide | None = None
        self._said: Sequence[str] = ()
        self._collected = UtteranceFrames(layout)
        self._begin()

    def begin(self, said: Sequence[str], stats: Stats | None = None) -> None:
        """The next sentence; `said` grows as its words are handed over, `stats` with its drafts."""
        self._begin(stats)
        self._said, self._own = said, None

    def begin_own(self, guide: SpeechGuide, stats: Stats | None = None) -> None:
        """A sentence in the model's own words."""
        self._begin(stats)
        self._own = guide

    def _begin(self, stats: Stats | None = None) -> None:
        self._stats = stats or Stats()
        self._judged = [[0, 0] for _ in range(self.layout.books)]  # drafts reported, per book
        self._frames += self._collected.count
        self._collected = UtteranceFrames(self.layout)
        self._said = ()
        self._noted = 0  # groups whose start has been noted

    def step(self, step: PassStats) -> Iterator[Sound]:
        """Yield what a pass made certain."""
        self._passes += step.passes
        self._drafts += step.draft_passes
        for token in step.tokens:
            if token >= self.layout.texts:
                self._tokens += 1
                self._collected.push(token)
        self._note()
        codes = self._collected.take()
        if codes.shape[1]:
            self._state, pcm = self.codec.decoder.step(self._state, codes[None])
            yield self._sound(pcm[0], codes)

    def finish(self) -> Iterator[Sound]:
        """The rest."""
        pcm = self.codec.decoder.finish(self._state)[0]
        self._words = [(min(at, self._samples), text) for at, text in self._words]
        if len(pcm) or self._words:
            yield self._sound(pcm, None)

    def _groups(self) -> list[str]:
        if self._own is None:
            return list(self._said)
        return (
            self.layout.text(self._own.text)
            .replace(",", " ,")
            .replace(".", " .")
            .replace("?", " ?")
            .split()
        )

    def _note(self) -> None:
        """Words whose sound begins: the start of each group that has a frame."""
        starts = self._collected.starts
        begun = len(starts) - (starts[-1] == self._collected.count)
        known = self._groups()
        while self._noted < min(begun, len(known)):
            text = known[self._noted]
            lead = "" if self._first or text in MARKS else " "
            at = (self._frames + starts[self._noted]) * self.codec.hop
            self._words.append((at, lead + text))
            self._first = False
            self._noted += 1

    def _sound(self, pcm: Tensor, codes: Tensor | None) -> Sound:
        end = self._samples + len(pcm) if codes is not None else 1 << 60
        now = [word for word in self._words if word[0] < end]
        self._words = self._words[len(now) :]
        starts = [max(0, at - self._samples) for at, text in now if text not in MARKS]
        sound = Sound(
            pcm.to(torch.float32),
            self.codec.sample_rate,
            text="".join(text for _, text in now),
            codes=codes,
            passes=self._passes,
            drafts=self._drafts,
            tokens=self._tokens,
            notes={**({"starts": starts} if starts else {}), **self._verified()},
        )
        self._samples += len(pcm)
        self._passes = self._drafts = self._tokens = 0
        return sound

    def _verified(self) -> dict[str, list[int]]:
        """Drafts verified and accepted since the piece before, one number a codebook."""
        books = range(self.layout.books)
        now = [list(self._stats.by_book.get(book, (0, 0))) for book in books]
        tried, stood = ([now[b][i] - self._judged[b][i] for b in books] for i in range(2))
        self._judged = now
        return {"drafted": tried, "accepted": stood} if any(tried) else {}
