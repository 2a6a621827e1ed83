"""Rows of a speech model's vocabulary: text first, then audio, and how both are written.

Text rows are marks of the layout, words of the domain and letters; audio rows are `<next>`, `<end>`
and the codes of all codebooks. A group is a word or a punctuation mark: the token that ends a word
has `_` behind it, and a word that is no row is spelled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import ModelError, SpecError

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
    """What the rows of a speech model stand for.

    Args:
        rows: Names of the text rows.
        books: Codebooks Q.
        entries: Codes per codebook V.
        voices: Names of the voices, as they are asked for.
        speeds: Words per minute.
        pitches: In espeak's unit, 0 to 99.
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
        """Whether a text id is the last of its group."""
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

        Raises:
            SpecError: An unknown voice, or a rate or pitch far from what was learned.
        """
        if voice not in self.voices:
            raise SpecError(f"voice={voice!r} is unknown; choose one of {', '.join(self.voices)}")
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
        """Read it.

        Raises:
            ModelError: The folder is no speech model.
        """
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
