"""Sequences of the speech model: ids, what each place owes, and where embeddings of sound go.

The kind of the next token is known from the layout, so a place is scored over text rows or over
audio rows alone. Text that a `<next>` owes comes at once, or late: passes that draft several
tokens run past it (arXiv 2505.03739 drafts so), and training does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.speech import Turn
from mmfast.models.speech_layout import LOOK_AHEAD, SpeechLayout
from mmfast.tiny.speech_bank import Heard, Said

NONE, TEXT, AUDIO = 0, 1, 2  # what a place owes
PATTERNS = ((11,), (11, 1, 1, 1), (5, 1, 1, 9, 1, 1, 1), (6,), (4,))  # tokens of each pass


@dataclass
class Line:
    """One of them while it is put together."""

    ids: list[int]
    owes: list[int]  # for each id, how it is scored
    sound: Heard | None = None
    slots: int = 0  # place of the first embedding of sound

    def add(self, ids: Sequence[int], kind: int = NONE) -> None:
        """Append ids."""
        self.ids += ids
        self.owes += repeat(kind, len(ids))


@dataclass(frozen=True)
class Batch:
    """Sequences of about one length, padded on the right."""

    ids: Tensor  # [B, L]
    kind: Tensor  # [B, L] what the place owes: the NEXT id, scored over text or audio rows
    mel: Tensor | None  # [B, 4 A, 80]
    at: Tensor | None  # [B, A] places of the embeddings, -1 = padding
    last: Tensor | None  # [B, A]
    count: Tensor | None  # [B, A]


def passes(rng: np.random.Generator) -> Iterator[int]:
    """How many tokens each pass of the backbone gives."""
    draw = rng.random()
    if draw < 0.4:
        return repeat(1)
    if draw < 0.75:
        pattern = PATTERNS[int(rng.integers(len(PATTERNS)))]
        return (n for _ in repeat(0) for n in pattern)
    return (int(rng.integers(1, 13)) for _ in repeat(0))


def interleave(
    line: Line, layout: SpeechLayout, said: Said, runs: Iterator[int], kind: int = NONE
) -> None:
    """Append text and sound by turns; `kind` tells whether the text is owed or given."""
    done = [layout.id("<done>")]
    first, queue = said.groups[: LOOK_AHEAD + 1], said.groups[LOOK_AHEAD + 1 :]
    for group in first:
        line.add(group, kind)
    queue = [*queue, done] if queue else []
    if not queue:
        line.add(done, kind)
    owed: list[list[int]] = []
    left, final = next(runs), len(said.sounds) - 1
    for i, sound in enumerate(said.sounds):
        tokens = [*sound.tolist(), layout.end if i == final else layout.next]
        for at, token in enumerate(tokens):
            line.add([token], AUDIO)
            if at == len(tokens) - 1 and queue:
                owed.append(queue.pop(0))
            left -= 1
            if left == 0:
                for group in owed:
                    line.add(group, kind)
                owed, left = [], next(runs)


def styled(layout: SpeechLayout, said: Said) -> list[int]:
    """Ids of voice, speed and pitch."""
    names = ("voice", "speed", "pitch")
    return [layout.id(f"<{n}{i}>") for n, i in zip(names, said.style, strict=True)]


def speaking(layout: SpeechLayout, said: Said, rng: np.random.Generator) -> Line:
    """A text that is said."""
    line = Line([], [])
    line.add([layout.id("<speak>"), *styled(layout, said)])
    spelled = [_spell(layout, g) if rng.random() < 0.04 else g for g in said.groups]
    interleave(line, layout, Said(said.style, spelled, said.sounds), passes(rng))
    return line


def _spell(layout: SpeechLayout, group: list[int]) -> list[int]:
    name = layout.rows[group[0]]
    if len(group) > 1 or len(name) < 3 or not name.endswith("_"):
        return group
    return [layout.index[c] for c in name[:-2]] + [layout.index[name[-2:]]]


def listening(layout: SpeechLayout, sound: Heard, line: Line | None = None) -> Line:
    """Speech that is understood."""
    line = line or Line([], [])
    line.add([layout.id("<listen>")])
    line.sound, line.slots = sound, len(line.ids)
    line.add([0] * len(sound.last))
    line.add([layout.id("<heard>")])
    line.add([*sound.words, layout.id("<done>")], TEXT)
    return line


def chatting(
    layout: SpeechLayout,
    turns: Sequence[Turn],
    sound: Heard,
    said: Said,
    rng: np.random.Generator,
) -> Line:
    """A conversation: the past as text, the last question heard, its reply said."""
    line = Line([], [])
    line.add(layout.history([(turn.role, turn.text) for turn in turns[:-2]]))
    line = listening(layout, sound, line)
    line.add([layout.id("<answer>"), *styled(layout, said)])
    interleave(line, layout, said, passes(rng), TEXT)
    return line


def stack(lines: Sequence[Line]) -> Batch:
    """Sequences to a batch."""
    length = max(len(line.ids) for line in lines)
    ids = torch.zeros(len(lines), length, dtype=torch.long)
    kind = torch.zeros(len(lines), length, dtype=torch.long)
    for row, line in enumerate(lines):
        ids[row, : len(line.ids)] = torch.tensor(line.ids)
        kind[row, : len(line.owes) - 1] = torch.tensor(line.owes[1:])
    sounds = [line.sound for line in lines]
    if any(sound is None for sound in sounds):
        return Batch(ids, kind, None, None, None, None)
    slots = max(len(sound.last) for sound in sounds if sound)
    mel = np.full((len(lines), 4 * slots, 80), -11.5, np.float32)
    at, last, count = (np.full((len(lines), slots), -1) for _ in range(3))
    for row, (line, sound) in enumerate(zip(lines, sounds, strict=True)):
        assert sound is not None
        many = len(sound.last)
        mel[row, : 4 * many] = sound.mel
        at[row, :many] = line.slots + np.arange(many)
        last[row, :many], count[row, :many] = sound.last, sound.count
    return Batch(ids, kind, *(torch.from_numpy(x) for x in (mel, at, last, count)))


def buckets(
    lengths: Sequence[int], tokens: int, rng: np.random.Generator
) -> list[NDArray[np.int64]]:
    """Indices in batches of about so many tokens, alike in length, in random order."""
    order = np.argsort(np.asarray(lengths) + rng.uniform(0, 6, len(lengths)))
    found: list[list[int]] = [[]]
    for i in order.tolist():
        if found[-1] and lengths[i] * (len(found[-1]) + 1) > tokens:
            found.append([])
        found[-1].append(i)
    return [np.array(found[i]) for i in rng.permutation(len(found))]
