"""Which words of a reply have been heard: its text beside its sound."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from mmfast.core.speech import Sound

LOUD = 0.01  # -40 dB: what is quieter behind a word is the pause after it
PACE = 0.07  # seconds a letter, of words whose sound is not all there yet
_WIDE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without spaces: a sign is a word
_WORDS = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)\s*")


class Alignment:
    """The words of a reply, and the sample at which each has been said in full.

    The words of a piece begin with the piece; or `notes["starts"]` says where, in samples of the
    piece, one number a word. Words that begin together share the time until the next by their
    length. A word ends with its last loud sample: who is cut short in the pause behind it has
    said it. One that may go on in pieces to come has not been said in full.

    Attributes:
        samples: Of the sound so far.
        rate: Of them a second.
        finished: No more pieces come; set by the owner.
    """

    def __init__(self) -> None:
        self.samples = 0
        self.finished = False
        self.rate = 1
        self._words: list[str] = []  # joined they are the text
        self._ends: list[int] = []  # of all but the open ones
        self._start = 0  # of the open words, those behind the ends
        self._loud = 0  # behind the last loud sample

    @property
    def text(self) -> str:
        """All of it, heard or not."""
        return "".join(self._words)

    def add(self, sound: Sound) -> None:
        """The next piece."""
        self.rate, at = sound.rate, 0
        words = _WORDS.findall(sound.text) or [sound.text] * bool(sound.text)
        if words and self._goes_on(words[0]):
            self._words[-1] += words.pop(0)
        starts = list(sound.notes.get("starts") or [])[-len(words) :] if words else []
        for index, word in enumerate(words):
            start = starts[index] if index < len(starts) else at
            start = min(max(int(start), at), len(sound.pcm))
            self._hear(sound.pcm[at:start], self.samples + at)
            at = start
            self._begin(word, self.samples + at)
        self._hear(sound.pcm[at:], self.samples + at)
        self.samples += len(sound.pcm)

    def _goes_on(self, word: str) -> bool:
        """Whether it is a part of the word before: a mark behind it, a piece of a long one."""
        if not self._words or word[0].isspace() or re.match(f"[{_WIDE}]", word):
            return False
        return not self._words[-1][-1:].isspace()

    def _hear(self, pcm: Tensor, offset: int) -> None:
        loud = torch.nonzero(pcm.abs() > LOUD)
        if len(loud):
            self._loud = offset + int(loud[-1]) + 1

    def _begin(self, word: str, at: int) -> None:
        # text that runs ahead of its sound closes nothing: those words begin together
        if at > self._start or not self._words:
            self._ends += self._shared(at)
            self._start = at
        self._words.append(word)

    def _shared(self, stop: int) -> list[int]:
        """Ends of the open words, if nothing of them sounds behind `stop`."""
        letters = self._letters()
        # no loud sample at all: a silent word lasts as long as its pieces
        end = min(self._loud, stop) if self._loud > self._start else stop
        whole = letters[-1] if letters else 0
        return [self._start + (end - self._start) * n // whole for n in letters]

    def _paced(self) -> list[int]:
        """Ends of the open words while more of their sound may come: of all but the last."""
        return [self._start + int(n * PACE * self.rate) for n in self._letters()[:-1]]

    def _letters(self) -> list[int]:
        counts, done = [], 0
        for word in self._words[len(self._ends) :]:
            done += max(len(word.strip()), 1)
            counts.append(done)
        return counts

    def heard(self, samples: int) -> str:
        """The words whose sound ends within the first `samples`."""
        samples = min(samples, self.samples)
        ends = [*self._ends, *(self._shared(self.samples) if self.finished else self._paced())]
        count = 0
        while samples > 0 and count < len(ends) and ends[count] <= samples:
            count += 1
        return "".join(self._words[:count]).rstrip()
