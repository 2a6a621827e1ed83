"""Rows of a speech model's vocabulary: text first, then audio, and how both are written.

Text rows are marks of the layout, words of the domain and letters; audio rows are `<next>`, `<end>`
and the codes of all codebooks. A group is a word or a punctuation mark: the token that ends a word
has `_` behind it, and a word that is no row is spelled.

While the model speaks, text and sound take turns: the guide hands the text over two groups ahead of
the sound, one group for every `<next>`, and names again the group whose sound is due; it decides of
what kind a token is, not the model. Text may come as it is written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError, unknown
from mmfast.decoding.row import Open

FILE = "speech.json"
LOOK_AHEAD = 2  # groups of text that run before the group whose sound is due
BASIC = ("<pad>", "<speak>", "<listen>", "<heard>", "<user>", "<answer>", "<done>")
MARKS = (",", ".", "?")
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
GROUP = re.compile(r"[a-z']+|[,.?]")
LONGEST = 24  # letters of a word; the rest of a longer one is left out


def specials(voices: int, speeds: int, pitches: int) -> tuple[str, ...]:
    """The marks of the layout, in the order of their rows."""
    named = (("voice", voices), ("speed", speeds), ("pitch", pitches))
    return (*BASIC, *(f"<{name}{i}>" for name, many in named for i in range(many)))


def vocabulary(words: tuple[str, ...], marks: tuple[str, ...]) -> tuple[str, ...]:
    """All text rows: marks of the layout, punctuation, letters within and at the end, words."""
    known = [*marks, *MARKS, *LETTERS, *(f"{letter}_" for letter in LETTERS)]
    return tuple(dict.fromkeys([*known, *(f"{word}_" for word in words)]))


@dataclass(frozen=True)
class SpeechLayout:
    """Meaning of the rows of a speech model.

    `books` is the number of codebooks Q, `entries` that of codes in each; speeds are words per
    minute, pitches in espeak's unit, 0 to 99.
    """

    rows: tuple[str, ...]
    books: int
    entries: int
    voices: tuple[str, ...]
    speeds: tuple[int, ...]
    pitches: tuple[int, ...]
    index: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.index.update({name: i for i, name in enumerate(self.rows)})

    @property
    def texts(self) -> int:
        """Number of text rows; the row of `<next>`."""
        return len(self.rows)

    @property
    def next(self) -> int:
        """Row that ends the sound of a group and owes a group of text."""
        return len(self.rows)

    @property
    def end(self) -> int:
        """Row that ends all sound."""
        return len(self.rows) + 1

    @property
    def base(self) -> int:
        """Row of the first code."""
        return len(self.rows) + 2

    @property
    def total(self) -> int:
        """All rows."""
        return self.base + self.books * self.entries

    def id(self, name: str) -> int:
        """Row of a mark such as "<done>"."""
        return self.index[name]

    def group(self, text: str) -> list[int]:
        """Ids of one word or mark."""
        known = self.index.get(text if text in MARKS else f"{text}_")
        if known is not None:
            return [known]
        letters = [c for c in text if c in LETTERS][:LONGEST]
        return [self.index[c] for c in letters[:-1]] + [self.index[f"{c}_"] for c in letters[-1:]]

    def groups(self, text: str) -> list[list[int]]:
        """Ids of each word and mark of a text that is lower case and spelled out."""
        return [self.group(part) for part in GROUP.findall(text)]

    def history(self, turns: Sequence[tuple[str, str]]) -> list[int]:
        """Ids of what was said before, `(role, text)` each; of what the user said, no marks."""
        ids = []
        for role, text in turns:
            parts = GROUP.findall(text.lower())
            if role == "user":
                parts = [part for part in parts if part not in MARKS]
            ids.append(self.id("<user>" if role == "user" else "<answer>"))
            ids += [i for part in parts for i in self.group(part)]
            ids.append(self.id("<done>"))
        return ids

    def text(self, ids: list[int]) -> str:
        """Words of ids; marks of the layout leave nothing."""
        parts = [name for i in ids if not (name := self.rows[i]).startswith("<")]
        words = "".join(p[:-1] + " " if p.endswith("_") else p + " " * (p in MARKS) for p in parts)
        return re.sub(r" ([,.?])", r"\1", words).strip()

    def ends_group(self, row: int) -> bool:
        """Test if a text id is the last of its group."""
        name = self.rows[row]
        return name.endswith("_") or name in MARKS

    def code_ids(self, codes: Tensor) -> Tensor:
        """Codes `[Q, t]` to ids `[t * Q]`, frame after frame."""
        offset = self.base + self.entries * torch.arange(self.books)
        return (codes.T.long() + offset).flatten()

    def codes(self, ids: Tensor) -> Tensor:
        """Ids of whole frames `[t * Q]` to codes `[Q, t]`; a code of another book is taken as is.

        Greedy decoding does not confuse books; sampled and drafted ids may.
        """
        places = (ids - self.base).clamp(min=0) % self.entries
        return places.view(-1, self.books).T

    def style(self, voice: str, rate: int | None, pitch: int | None) -> list[int]:
        """The three ids of a voice, a rate and a pitch, the nearest that there are.

        Raises SpecError for an unknown voice, and for values far from what was learned.
        """
        if voice not in self.voices:
            raise SpecError(unknown("voice", voice, self.voices))
        speed = _nearest("rate", rate, self.speeds, "words per minute")
        high = _nearest("pitch", pitch, self.pitches, "of 99")
        number = self.voices.index(voice)
        return [self.id(f"<voice{number}>"), self.id(f"<speed{speed}>"), self.id(f"<pitch{high}>")]

    def save(self, folder: Path) -> None:
        """Write it beside the checkpoint."""
        values = asdict(self)
        del values["index"]
        (folder / FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SpeechLayout:
        """Read the layout of a folder; ModelError where it is no speech model."""
        try:
            values: Any = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise ModelError(
                f"{str(folder)!r} holds no {FILE}; give the folder of a speech model of mmfast"
            ) from None
        given: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**given)


def _nearest(name: str, value: int | None, known: tuple[int, ...], unit: str) -> int:
    if value is None:
        return len(known) // 2
    slack = max(b - a for a, b in pairwise(known))
    if isinstance(value, bool) or not known[0] - slack <= value <= known[-1] + slack:
        choices = ", ".join(map(str, known))
        raise SpecError(f"{name}={value!r} is out of reach; choose one of {choices} {unit}")
    return min(range(len(known)), key=lambda i: abs(known[i] - value))


LONGEST_GROUP = 70  # frames of one group; a word of the domain has 25 at most


class SpeechGuide:
    """Leads one utterance; a `mmfast.decoding.row.Guide`.

    `groups` gives the ids of each word and mark as they come. A group is ended by force after
    `longest` frames.
    """

    def __init__(
        self, layout: SpeechLayout, groups: Iterator[list[int]], *, longest: int = LONGEST_GROUP
    ) -> None:
        self.layout, self.done = layout, False
        self.draft_rows = slice(layout.texts, layout.total)
        self._finish = layout.id("<done>")
        self._source, self._longest = groups, longest * layout.books
        self._peeked: list[list[int]] = []  # taken from the source, not yet handed over
        self._ended = False  # `<done>` is there
        self._owed: list[int] = []  # to be forced now
        self._handed: list[list[int]] = []  # groups that are there
        self._spoken = 0  # whose sound has ended
        self._length = 0  # tokens of the sound of this one
        self._break = False  # it has been ended by force

    def opening(self) -> list[int]:
        """Ids of the first groups, which end the prompt; empty: nothing to say."""
        first: list[int] = []
        for _ in range(LOOK_AHEAD + 1):
            first += self._hand()
        if not self._ended and self._peek(0) is None:
            first += self._hand()
        if not self._handed:
            self.done = True
            return []
        return first + self._handed[0]

    def forced(self) -> Sequence[int]:
        """Text that is owed, and the end of a sound that would not end."""
        found = self._owed
        self._owed = []
        if self._break:
            self._break = False
            found = [self.layout.next, *found, *self._turn()]
        return found

    def ahead(self, drafts: Sequence[int]) -> Sequence[int]:
        """Return what would be owed behind these drafts."""
        if self._length + len(drafts) >= self._longest:
            return ()
        found, known, ended = list(self._owed), list(self._handed), self._ended
        turns = sum(token in (self.layout.next, self.layout.end) for token in drafts)
        for turn in range(turns):
            if not ended:
                group = self._peek(turn)
                found += [self._finish] if group is None else group
                known += [] if group is None else [group]
                ended = group is None
            if self._spoken + turn + 1 >= len(known):
                break
            found += known[self._spoken + turn + 1]
        return found

    def rows(self) -> slice:
        """Audio rows."""
        return self.draft_rows

    def guesses(self, token: int, place: int) -> slice:
        """Codes of the book whose turn it is; a group may end in front of a frame."""
        book = self.book(token)
        if book is None:
            return self.draft_rows
        turn = (book + 1 + place) % self.layout.books
        stop = self.layout.base + (turn + 1) * self.layout.entries
        return slice(stop - self.layout.entries if turn else self.layout.texts, stop)

    def stops(self, token: int) -> bool:
        """At the end of a sound, where text is to follow."""
        last = self._ended and self._spoken + 1 >= len(self._handed)
        return token in (self.layout.next, self.layout.end) and not last

    def book(self, token: int) -> int | None:
        """The codebook of a code."""
        place = token - self.layout.base
        return place // self.layout.entries if place >= 0 else None

    def push(self, tokens: Sequence[int]) -> None:
        """Tokens that stand."""
        for token in tokens:
            if token >= self.layout.base:
                self._length += 1
                self._break = self._length >= self._longest
            elif token >= self.layout.texts and not self.done:
                self._owed += self._turn()

    def _turn(self) -> list[int]:
        """A group's sound has ended; what is owed now."""
        self._length, self._break = 0, False
        self._spoken += 1
        found = self._hand()
        if self._spoken >= len(self._handed):
            self.done = True
            return []
        return found + self._handed[self._spoken]

    def _peek(self, depth: int) -> list[int] | None:
        while len(self._peeked) <= depth:
            group = next(self._source, None)
            if group is None:
                break
            if group:
                self._peeked.append(group)
        return self._peeked[depth] if depth < len(self._peeked) else None

    def _hand(self) -> list[int]:
        """Ids of the next group, `<done>` behind the last, nothing behind that."""
        if self._ended:
            return []
        group = self._peek(0)
        if group is None:
            self._ended = True
            return [self._finish]
        del self._peeked[0]
        self._handed.append(group)
        return group


class TextGuide(Open):
    """Leads text to its `<done>`, `limit` tokens at most."""

    def __init__(self, layout: SpeechLayout, limit: int) -> None:
        done = layout.id("<done>")
        super().__init__(limit, (done,))
        self._texts = slice(done, layout.texts)

    def rows(self) -> slice:
        """Text rows."""
        return self._texts
