"""Turns of a conversation: the words that were heard, bounded in number and length."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mmfast.core.errors import MmfastError, unknown
from mmfast.core.speech import Sound, Turn
from mmfast.voice.playback import Playback

LOUD = 0.01  # -40 dB: what is quieter behind a word is the pause after it
PACE = 0.07  # seconds a letter, of words whose sound is not all there yet
_WIDE = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"  # scripts without spaces: a sign is a word
_WORDS = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)\s*")


class Alignment:
    """The words of a reply, and the sample at which each has been said in full.

    The words of a piece begin with the piece; or `notes["starts"]` says where, in samples of the
    piece, one number a word. Words that begin together share the time until the next by their
    length. A word ends with its last loud sample: who is cut short in the pause behind it has said
    it. One that may go on in pieces to come has not been said in full; the owner sets `finished`
    when none come.
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
        """Tell a part of the word before, such as a mark behind it, from a new word."""
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


TURNS = 32
LETTERS = 8000


@dataclass
class HistoryTurn:
    """One side's turn; text that is not given by sound is in `said`.

    Of a reply, `words` has the text beside sound, and `playback` what of that has been played (None
    once it is settled, when `arrived` counts samples that its listener got). It was cut off after
    `limit` samples, None where it was not. Of a user's turn, `seconds` is the length of the sound;
    `understood`: it has become text, which may be none.
    """

    id: str
    role: Literal["user", "assistant", "system"]
    said: str = ""
    words: Alignment | None = None
    playback: Playback | None = None
    limit: int | None = None
    arrived: int = 0
    seconds: float = 0.0
    understood: bool = False

    @property
    def text(self) -> str:
        """Text that was heard so far; it grows while it is played."""
        if self.words is None:
            return self.said
        if self.words.finished and not self.words.samples:
            return self.words.text.strip()  # without sound it is read, not heard
        return self.words.heard(self.played)

    @property
    def played(self) -> int:
        """Samples of it that have sounded and are not cut off."""
        if self.limit is not None:
            return self.limit
        return 0 if self.playback is None else self.playback.played()

    def settle(self, played: int) -> None:
        """It sounds no more: so many samples of it have been played."""
        if self.playback is not None:
            self.arrived, self.playback = self.playback.arrived, None
        self.limit = played

    def truncate(self, ms: float) -> float:
        """Keep as much of its sound as its listener heard; returns milliseconds, or 0."""
        if self.words is None:
            return 0.0
        if self.playback is not None:
            self.settle(self.playback.stop())
        samples = round(min(max(ms, 0.0), 1e9) * self.words.rate / 1e3)
        self.limit = max(0, min(samples, self.arrived))
        return 1e3 * self.limit / self.words.rate


class History:
    """Items of a conversation; the oldest beyond `turns` or `letters` go, but the last two stay."""

    def __init__(self, turns: int = TURNS, letters: int = LETTERS) -> None:
        for name, value in (("turns", turns), ("letters", letters)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise MmfastError(f"{name}={value!r} bounds no history; give a whole number from 1")
        self.limits = (turns, letters)
        self.items: dict[str, HistoryTurn] = {}
        self.forgotten = 0

    def add(self, item: HistoryTurn) -> None:
        """Append an item."""
        self.items[item.id] = item
        self.trim()

    def trim(self) -> None:
        """Forget the oldest where there are too many."""
        turns, letters = self.limits
        whole = {id: len(_whole(item)) for id, item in self.items.items()}
        left = sum(whole.values())
        for id in list(self.items)[:-2]:
            if len(self.items) <= max(turns, 2) and left <= letters:
                return
            del self.items[id]
            left, self.forgotten = left - whole[id], self.forgotten + 1

    def get(self, id: str) -> HistoryTurn:
        """An item; MmfastError where there is none of that name, or it is forgotten."""
        if id not in self.items:
            raise MmfastError(unknown("item", id, self.items or ["none yet"]))
        return self.items[id]

    def remove(self, id: str) -> HistoryTurn:
        """Forget an item; errors as for `get`."""
        self.get(id)
        return self.items.pop(id)

    def turns(self) -> tuple[Turn, ...]:
        """Return what was heard, oldest first, without turns of which nothing was heard."""
        found = (
            Turn(item.role, item.text.strip())
            for item in self.items.values()
            if item.role != "system"
        )
        return tuple(turn for turn in found if turn.text)

    def save(self) -> list[dict[str, Any]]:
        """As plain values: what was heard so far."""
        return [
            {"id": item.id, "role": item.role, "text": item.text} for item in self.items.values()
        ]

    def restore(self, saved: Iterable[dict[str, Any]]) -> None:
        """Go on with what `save` gave; MmfastError for anything else."""
        items = {}
        try:
            for row in saved:
                if row["role"] not in ("user", "assistant"):
                    raise ValueError(row["role"])
                items[str(row["id"])] = HistoryTurn(str(row["id"]), row["role"], str(row["text"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MmfastError(
                f"this is no saved conversation ({error!r}); give what save() returned"
            ) from error
        self.items = items
        self.trim()


def _whole(item: HistoryTurn) -> str:
    return item.said if item.words is None else item.words.text
