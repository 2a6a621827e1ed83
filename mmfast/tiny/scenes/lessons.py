"""Training batches of the larger world: several questions about a clip or picture in one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmfast.tiny.scenes import outside
from mmfast.tiny.scenes.bank import SceneBank
from mmfast.tiny.scenes.facts import clip_items, picture_items
from mmfast.tiny.scenes.questions import CLIP_KINDS, OUTSIDE, SceneItem, varied
from mmfast.tiny.training import shares
from mmfast.tiny.video.lessons import Lesson, PackedQuestions, Weights, answer, laid_out, pack
from mmfast.tiny.video.model import ASSISTANT, END, USER
from mmfast.tiny.video.scene import IGNORE, SAMPLED

KINDS = (*CLIP_KINDS, OUTSIDE)
LONG = ("where", "describe")  # scored in training by tokens
LEAST = 0.4  # weight of a kind that is always right
Pair = tuple[list[int], list[int]]  # ids of a question and its answer


@dataclass(frozen=True)
class Encoded:
    """Visual tokens of a bank after tower and projector, clips outside the world last."""

    clips: Tensor  # pooled, float16 `[n, T, P, H]`
    pictures: Tensor  # as they are, float16 `[m, 1, 4 P, H]`
    frames: list[tuple[int, int]]  # clip and frame of each picture


class SceneSampler:
    """Batches of clips, half of them played backwards, and of pictures."""

    def __init__(
        self, bank: SceneBank, encoded: Encoded, newline: Tensor, tokenizer: Any, seed: int
    ) -> None:
        self.bank, self.encoded, self.newline, self.tokenizer = bank, encoded, newline, tokenizer
        self.rng = np.random.default_rng([seed, 2])
        self.known: dict[tuple[int, bool | int], list[SceneItem]] = {}

    def clips(
        self, chosen: Sequence[int], questions: int, weights: Weights, kept: bool = False
    ) -> Lesson:
        """A batch of clips; `kept` asks in the wordings that training does not show."""
        tokens, rows, kinds = [], [], []
        for clip in chosen:
            back = bool(self.rng.random() < 0.5)
            shown = self.encoded.clips[clip].float()
            tokens.append(shown.flip(0) if back else shown)
            row, names = self._row(self._clip(clip, back), questions, weights, kept)
            rows.append(row)
            kinds.append(names)
        return Lesson(torch.stack(tokens), pack(rows), kinds)

    def pictures(self, chosen: Sequence[int], questions: int, weights: Weights) -> Lesson:
        """A batch of pictures."""
        found = [
            self._row(self._picture(*self.encoded.frames[i]), questions, weights, False)
            for i in chosen
        ]
        shown = laid_out(self.encoded.pictures[list(chosen)].float(), self.newline)
        return Lesson(shown, pack([row for row, _ in found]), [names for _, names in found])

    def _clip(self, clip: int, back: bool) -> list[SceneItem]:
        if clip >= len(self.bank.views):
            return []
        if (clip, back) not in self.known:
            table = self.bank.clips.tables[clip]
            table = table.backwards() if back else table
            self.known[clip, back] = clip_items(self.bank.views[clip], table)
        return self.known[clip, back]

    def _picture(self, clip: int, frame: int) -> list[SceneItem]:
        if clip >= len(self.bank.views):
            return []
        key = clip, 2 + frame
        if key not in self.known:
            table = self.bank.clips.tables[clip]
            self.known[key] = picture_items(self.bank.views[clip], table, frame)
        return self.known[key]

    def _row(
        self, items: list[SceneItem], most: int, weights: Weights, kept: bool
    ) -> tuple[list[Pair], list[str]]:
        """Ids and kinds of the questions asked about a medium, none of whose items is outside."""
        strange = not items
        if strange:  # anything that could be asked of another clip
            items, most = self._clip(int(self.rng.integers(len(self.bank.views))), False), 5
        chosen = self._choose(items, most, weights)
        found = [(self._ids(item, kept, strange), OUTSIDE if strange else item.kind)
                 for item in chosen]  # fmt: skip
        if not strange and self.rng.random() < weights[OUTSIDE]:
            text = varied(outside.question(self.rng, kept), self.rng)
            found.append(((self._encode(text), self._encode(outside.REFUSAL)), OUTSIDE))
        return [pair for pair, _ in found], [kind for _, kind in found]

    def _choose(self, items: list[SceneItem], most: int, weights: Weights) -> list[SceneItem]:
        keyed, seen = [], dict[str, int]()
        for which in self.rng.permutation(len(items)):
            item = items[which]
            seen[item.kind] = place = seen.get(item.kind, 0) + 1
            # Exponential race: the n-th item of a kind is n times less urgent.
            keyed.append((self.rng.exponential() * place / weights[item.kind], item))
        return [item for _, item in sorted(keyed, key=lambda pair: pair[0])[:most]]

    def _ids(self, item: SceneItem, kept: bool, strange: bool) -> Pair:
        question = self._encode(self._worded(item, kept))
        if item.before is not None:
            said = outside.REFUSAL if strange else item.before.answer
            first = self._encode(self._worded(item.before, kept))
            question = [*first, ASSISTANT, *self._encode(said), END, USER, *question]
        return question, self._encode(outside.REFUSAL if strange else item.answer)

    def _worded(self, item: SceneItem, kept: bool) -> str:
        numbers = item.wordings(kept)
        return varied(item.worded(numbers[int(self.rng.integers(len(numbers)))]), self.rng)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def picture_frames(bank: SceneBank, many: int, seed: int) -> list[tuple[int, int]]:
    """Clip and frame of so many pictures on which something can be asked, strangers behind them."""
    rng, found, inside = np.random.default_rng([seed, 4]), list[tuple[int, int]](), len(bank.views)
    for clip in range(min(many, inside)):
        frame = int(rng.integers(SAMPLED))
        if picture_items(bank.views[clip], bank.clips.tables[clip], frame):
            found.append((clip, frame))
    strangers = range(inside, len(bank.clips.tables))
    return found + [(clip, int(rng.integers(SAMPLED))) for clip in strangers]


def token_weights(packed: PackedQuestions) -> Tensor:
    """Weight of each answer token: a long answer weighs as the root of its length. `[n]`."""
    asked = packed.labels != IGNORE
    rows = torch.arange(len(asked))[:, None] * (int(packed.block.max()) + 1)
    answers = (rows + packed.block)[asked]  # number of the answer
    return torch.bincount(answers)[answers].float().rsqrt()


def scene_loss(model: Any, states: Tensor, packed: PackedQuestions) -> Tensor:
    """Weighted mean loss of the answer tokens: states `[B, L, D]`."""
    asked = packed.labels != IGNORE
    each = cross_entropy(
        model.lm_head(states[asked]).float(), packed.labels[asked], reduction="none"
    )
    weights = token_weights(packed)
    return (each * weights).sum() / weights.sum()


@torch.no_grad()
def scene_score(model: Any, lessons: Sequence[Lesson]) -> Weights:
    """Share of answers that are right by kind; of long ones the share of their tokens."""
    marks: list[tuple[str, bool]] = []
    for lesson in lessons:
        states = answer(model, lesson, lesson.every).states
        guesses, packed = model.lm_head(states).argmax(-1), lesson.packed
        for line, (kinds, row) in enumerate(
            zip(lesson.kinds, packed.correct(guesses), strict=True)
        ):
            for number, (kind, right) in enumerate(zip(kinds, row, strict=True)):
                if kind not in LONG:
                    marks.append((kind, right))
                    continue
                mine = (packed.block[line] == number) & (packed.labels[line] != IGNORE)
                same = guesses[line][mine] == packed.labels[line][mine]
                marks += [(kind, bool(each)) for each in same]
    return shares(marks, KINDS)
