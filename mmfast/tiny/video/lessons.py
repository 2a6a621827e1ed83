"""What a training step of the decoder is made of: clips, questions and dense labels.

Pack many questions about one clip into one row: the visual prefix is computed once.

Each question sees the prefix and itself, and its positions start right after the prefix, so
that a packed row gives the same numbers as asking the questions one at a time.

Lessons about single pictures, so that the model also answers through its image path.

A picture takes another way through LLaVA-OneVision than a frame: its patches are not pooled, they
come twice (the whole picture and its only tile), and every row of the tile ends with a newline.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import LlavaOnevisionForConditionalGeneration, PreTrainedTokenizerFast

from mmfast.tiny.video.build import ASSISTANT, END
from mmfast.tiny.video.clips import Bank
from mmfast.tiny.video.questions import KINDS, WORDINGS, Fact, facts
from mmfast.tiny.video.scene import (
    COLOURS,
    SHAPES,
    Table,
    count_labels,
    motion_labels,
    thing_labels,
)
from mmfast.tiny.video.tower import scale_pixels, tower_features

IGNORE = -100


@dataclass(frozen=True)
class PackedQuestions:
    """Questions and answers of a batch, one row per clip, padded on the right."""

    ids: Tensor  # [B, L]
    block: Tensor  # [B, L] number of the question, -1 = padding
    within: Tensor  # [B, L] place in its question
    labels: Tensor  # [B, L] next token where it belongs to an answer, else IGNORE
    named: Tensor  # [B, L] 1 + the thing whose name ends here, 0 = none

    def mask(self, prefix: int) -> Tensor:
        """What each question token may look at: bool [B, 1, L, prefix + L]."""
        same = self.block[:, :, None] == self.block[:, None, :]
        own = (same & (self.within[:, :, None] >= self.within[:, None, :])).unsqueeze(1)
        seen = torch.ones(*own.shape[:-1], prefix, dtype=torch.bool, device=own.device)
        return torch.cat([seen, own], -1)

    def correct(self, guesses: Tensor) -> list[list[bool]]:
        """Per row and question, whether every answer token is right: guesses [B, L]."""
        wrong = (guesses != self.labels) & (self.labels != IGNORE)
        return [
            [not bool(w[b == k].any()) for k in range(int(b.max()) + 1)]
            for w, b in zip(wrong, self.block, strict=True)
        ]


def pack(
    rows: Sequence[Sequence[tuple[list[int], list[int]]]],
    marks: Sequence[Sequence[dict[int, int]]] = (),
) -> PackedQuestions:
    """Pack rows of (question ids, answer ids).

    Args:
        rows: questions and answers per clip.
        marks: for each of them, which thing (1 + number) is named up to which question token.
    """
    columns: list[list[list[int]]] = [[], [], [], [], []]
    for line, row in enumerate(rows):
        ids: list[int] = []
        block: list[int] = []
        within: list[int] = []
        labels: list[int] = []
        named: list[int] = []
        for number, (question, answer) in enumerate(row):
            text = [*question, ASSISTANT, *answer]
            ids += text
            block += [number] * len(text)
            within += range(len(text))
            labels += [IGNORE] * len(question) + [*answer, END]
            mark = marks[line][number] if marks else {}
            named += [mark.get(place, 0) for place in range(len(text))]
        for column, value in zip(columns, (ids, block, within, labels, named), strict=True):
            column.append(value)
    length = max(len(ids) for ids in columns[0])
    padded = [
        torch.tensor([v + [fill] * (length - len(v)) for v in column])
        for column, fill in zip(columns, (END, -1, 0, IGNORE, 0), strict=True)
    ]
    return PackedQuestions(*padded)


Weights = dict[str, float]


@dataclass(frozen=True)
class Lesson:
    """One batch."""

    tokens: Tensor  # [B, T, P, D]
    packed: PackedQuestions
    kinds: list[list[str]]  # per clip, the kind of each question
    motion: dict[str, Tensor]  # [B, T, P]
    count: Tensor  # [B, T]
    things: dict[str, Tensor]  # [B, 1 + THINGS], see thing_labels


class LessonSampler:
    """Draws batches from a bank whose visual tokens are already computed.

    Half of the clips are shown backwards: the features of a frame do not know the direction of
    time, so this is another clip for free, with its own facts.
    """

    def __init__(
        self, bank: Bank, tokens: Tensor, tokenizer: PreTrainedTokenizerFast, seed: int
    ) -> None:
        self.bank, self.tokens, self.tokenizer = bank, tokens, tokenizer
        self.rng = np.random.default_rng(seed)
        self.texts: dict[str, list[int]] = {}
        self.known: dict[tuple[int, bool], tuple[dict[str, list[Fact]], dict[str, Tensor]]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, remembered."""
        if text not in self.texts:
            self.texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.texts[text]

    def lesson(self, clips: list[int], questions: int, weights: Weights) -> Lesson:
        """A batch of the given clips with about so many questions each."""
        tokens, rows, marks, kinds, motions, counts, things = [], [], [], [], [], [], []
        for clip in clips:
            back = bool(self.rng.random() < 0.5)
            by_kind, dense = self._knowledge(clip, back)
            chosen = self._choose(by_kind, questions, weights)
            rows.append([(self.ids(self._word(f)), self.ids(f.answer)) for f in chosen])
            marks.append([self._marks(clip, ids) for ids, _ in rows[-1]])
            things.append(
                thing_labels(self.bank.tables[clip].backwards() if back else self.bank.tables[clip])
            )
            kinds.append([f.kind for f in chosen])
            shown = self.tokens[clip].float()
            tokens.append(shown.flip(0) if back else shown)
            counts.append(dense["count"])
            motions.append(dense)
        motion = {
            k: torch.stack([m[k] for m in motions]).long() for k in motions[0] if k != "count"
        }
        named = {k: torch.stack([t[k] for t in things]) for k in things[0]}
        packed = pack(rows, marks)
        return Lesson(torch.stack(tokens), packed, kinds, motion, torch.stack(counts), named)

    def _marks(self, clip: int, ids: list[int]) -> dict[int, int]:
        """Where the names of things end in a question."""
        table, found = self.bank.tables[clip], {}
        for thing in range(table.count):
            first, second = self.ids(" " + table.name(thing))
            for place in range(1, len(ids)):
                if ids[place - 1] == first and ids[place] == second:
                    found[place] = thing + 1
        return found

    def _knowledge(self, clip: int, back: bool) -> tuple[dict[str, list[Fact]], dict[str, Tensor]]:
        if (clip, back) not in self.known:
            table, owners = self.bank.tables[clip], self.bank.cells[clip]
            if back:
                table, owners = table.backwards(), owners.flip(0)
            by_kind = defaultdict(list)
            for fact in facts(table):
                by_kind[fact.kind].append(fact)
            dense = {k: v.to(torch.int8) for k, v in motion_labels(owners, table).items()}
            dense["count"] = count_labels(table)
            self.known[clip, back] = (dict(by_kind), dense)
        return self.known[clip, back]

    def _choose(self, by_kind: dict[str, list[Fact]], most: int, weights: Weights) -> list[Fact]:
        """Facts in random order, kinds drawn by weight, none twice."""
        keyed = []
        for kind, known in by_kind.items():
            for place, which in enumerate(self.rng.permutation(len(known))):
                # Exponential race: the n-th fact of a kind is n times less urgent.
                delay = self.rng.exponential() * (1 + place) / weights[kind]
                keyed.append((delay, known[which]))
        return [fact for _, fact in sorted(keyed, key=lambda pair: pair[0])[:most]]

    def _word(self, fact: Fact) -> str:
        text = fact.ask(int(self.rng.integers(len(WORDINGS[fact.kind]))))
        return text if self.rng.random() < 0.85 else text.rstrip("?")


def even_weights() -> Weights:
    """The same weight for every kind."""
    return dict.fromkeys(KINDS, 1.0)


WAYS = ("random", "uniform", "change", "diverse")


def choose(tokens: Tensor, keep: int, way: str, rng: torch.Generator) -> Tensor:
    """Indices of the tokens kept, ascending.

    Args:
        tokens: pooled visual tokens. # [B, T, P, D]
        keep: how many per clip.
        way: one of WAYS.
        rng: source of randomness.

    Returns:
        int64 [B, keep].
    """
    batch, frames, patches, _ = tokens.shape
    total = frames * patches
    if way == "uniform":
        shift = torch.rand((), generator=rng)
        picked = ((torch.arange(keep) + shift) * (total / keep)).long().clamp(max=total - 1)
        return picked.expand(batch, keep)
    if way == "diverse":
        return _farthest(tokens.flatten(1, 2), keep).sort(-1).values
    score = torch.rand(batch, total, generator=rng)
    if way == "change":
        unit = normalize(tokens, dim=-1)
        change = 1 - (unit[:, 1:] * unit[:, :-1]).sum(-1)
        new = change.new_full((batch, 1, patches), 2.0)  # the first frame
        score = torch.cat([new, change], 1).flatten(1) + 0.02 * score
    return score.topk(keep).indices.sort(-1).values


def _farthest(tokens: Tensor, keep: int) -> Tensor:
    """Greedy: always the token least like any chosen one: [B, N, D] -> [B, keep]."""
    unit = normalize(tokens, dim=-1)
    gap = 1 - unit @ unit.mT  # [B, N, N]
    rows = torch.arange(len(tokens))
    chosen = [gap.mean(-1).argmax(-1)]
    nearest = gap[rows, chosen[0]]
    for _ in range(keep - 1):
        chosen.append(nearest.argmax(-1))
        nearest = torch.minimum(nearest, gap[rows, chosen[-1]])
        nearest[rows, chosen[-1]] = -1.0  # never twice
    return torch.stack(chosen, -1)


# Words that a video model's vocabulary knows already: it is fixed by the questions about clips.
PLACES = ("Where is the {0}?", "In which corner is the {0}?")
COUNTS = ("How many objects are there?", "How many shapes can you see?")
NUMBERS = ("What number is on the screen?", "Which number is shown?")


def still_facts(table: Table, frame: int) -> list[tuple[Fact, tuple[str, ...]]]:
    """What can be asked about one frame, with the wordings for it."""
    there = [i for i in range(table.count) if table.alive[i, frame]]
    clear = [i for i in there if table.seen[i, frame] >= 0.6]
    found: list[tuple[Fact, tuple[str, ...]]] = []
    for i in clear:
        shape, colour = SHAPES[table.shape[i]], tuple(COLOURS)[table.colour[i]]
        if sum(table.shape[j] == table.shape[i] for j in there) == 1:
            found.append((Fact("colour", (shape,), colour), WORDINGS["colour"]))
        if sum(table.colour[j] == table.colour[i] for j in there) == 1:
            found.append((Fact("shape", (colour,), shape), WORDINGS["shape"]))
        x, y = table.place[i, frame] - 48
        if min(abs(x), abs(y)) >= 7:
            corner = f"{'top' if y < 0 else 'bottom'} {'left' if x < 0 else 'right'}"
            found.append((Fact("position", (table.name(i),), corner), PLACES))
    if there and len(clear) == len(there):
        found.append((Fact("count", (), str(len(there))), COUNTS))
    if table.shown[frame]:
        found.append((Fact("number", (), str(table.number)), NUMBERS))
    return found


class Gallery:
    """One frame of each of the first clips of a bank, as the image path encodes it."""

    def __init__(
        self,
        model: LlavaOnevisionForConditionalGeneration,
        bank: Bank,
        size: int,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.rng = np.random.default_rng([seed, 1])
        self.times = self.rng.integers(bank.frames.shape[1], size=size)
        self.facts = [
            still_facts(t, int(f)) for t, f in zip(bank.tables[:size], self.times, strict=True)
        ]
        self.useful = [i for i, known in enumerate(self.facts) if known]
        self.tokens = self._encode(bank.frames[torch.arange(size), torch.from_numpy(self.times)])

    @torch.no_grad()
    def _encode(self, frames: Tensor) -> Tensor:
        project = self.model.model.multi_modal_projector
        parts = [
            project(tower_features(self.model, scale_pixels(part))) for part in frames.split(128)
        ]
        return torch.cat(parts).half()  # [n, P, H]

    def lesson(self, size: int, questions: int) -> Lesson:
        """A batch of pictures; the newline that ends it is added by the forward pass."""
        self.last = chosen = self.rng.choice(self.useful, size, replace=False)
        rows, kinds = [], []
        for picture in chosen:
            known = self.facts[picture]
            asked = [known[i] for i in self.rng.permutation(len(known))[:questions]]
            kinds.append([fact.kind for fact, _ in asked])
            rows.append([self._ids(fact, wordings) for fact, wordings in asked])
        base = self.tokens[torch.from_numpy(chosen)].float()  # [B, P, H]
        side = round(base.shape[1] ** 0.5)
        newline = self.model.model.image_newline.detach().expand(size, side, 1, -1)
        tile = torch.cat([base.unflatten(1, (side, side)), newline], 2).flatten(1, 2)
        shown = torch.cat([base, tile[:, :-1]], 1)[
            :, None
        ]  # [B, 1, P + rows * (columns + 1) - 1, H]
        return Lesson(shown, pack(rows), kinds, {}, torch.zeros(size, 1, dtype=torch.long), {})

    def _ids(self, fact: Fact, wordings: tuple[str, ...]) -> tuple[list[int], list[int]]:
        text = wordings[self.rng.integers(len(wordings))].format(*fact.slots)
        if self.rng.random() < 0.15:
            text = text.rstrip("?")
        return self.tokenizer.encode(text), self.tokenizer.encode(fact.answer)
