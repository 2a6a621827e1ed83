"""A training step of the stream model: short streams put together from clips, with questions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.tiny.build import USER, VIDEO
from mmfast.tiny.packing import Packed, pack
from mmfast.tiny.stream_bank import FACT_FRAMES, SCENE_FRAMES, Clips
from mmfast.tiny.world import NAMES
from mmfast.tiny.world_questions import KINDS, NOW, now_text, past_text

NEWLINE = VIDEO  # stands for the model's newline embedding in packed questions
SEGMENTS = ((8, 5), (5, 3))  # facts and scenes of a stream whose frames are thinned, or whole
THIN = (18, 10)  # tokens of a thinned frame of a fact, of a scene


@dataclass(frozen=True)
class Slots:
    """How the streams of a batch are laid out; the same for all of them.

    Attributes:
        fact: Whether each frame shows a fact. `[T]`
        clip: Number of the segment that each frame belongs to. `[T]`
        keep: Tokens kept of each frame. `[T]`
    """

    fact: list[bool]
    clip: list[int]
    keep: list[int]


@dataclass(frozen=True)
class StreamLesson:
    """One batch.

    Attributes:
        tokens: Kept visual tokens of all frames. `[B, N, D]`
        spot: Which of its frame's tokens each one is. `[B, N]`
        frame: The frame of each token. `[N]`
        slots: See there.
        packed: The questions.
        kinds: Of each question.
        target: Per question 1 + the segment whose fact it asks about, 0 for the present. `[B, Q]`
        facts: What each fact segment shows: name, tens, ones, corner; -100 elsewhere. `[B, S, 4]`
    """

    tokens: Tensor
    spot: Tensor
    frame: Tensor
    slots: Slots
    packed: Packed
    kinds: list[list[str]]
    target: Tensor
    facts: Tensor


CORNERS = ("top left", "top right", "bottom left", "bottom right")


class StreamSchool:
    """Draws batches of streams.

    Args:
        facts, scenes: What they are put together from.
        tokenizer: The checkpoint's.
        seed: Of everything drawn.
    """

    def __init__(self, facts: Clips, scenes: Clips, tokenizer: Any, seed: int) -> None:
        self.facts, self.scenes, self.tokenizer = facts, scenes, tokenizer
        self.rng = np.random.default_rng([seed, 40])
        self.texts: dict[str, list[int]] = {}

    def lesson(self, batch: int, thin: bool, questions: tuple[int, int]) -> StreamLesson:
        """A batch of streams with about so many questions on facts, and on the present."""
        facts, scenes = SEGMENTS[not thin]
        order = self._order(facts, scenes)
        slots = _slots(order, thin)
        rows: list[list[tuple[list[int], list[int]]]] = []
        kinds, targets, shown, told = [], [], [], []
        for _ in range(batch):
            clips = self._draw(order)
            asked = self._ask(order, clips, questions)
            rows.append([(self._ids(q, True), self._ids(a)) for _, q, a, _ in asked])
            kinds.append([kind for kind, *_ in asked])
            targets.append(torch.tensor([about for *_, about in asked]))
            parts = [
                (self.facts if f else self.scenes).tokens[c]
                for f, c in zip(order, clips, strict=True)
            ]
            shown.append(torch.cat(parts).float())  # [T, P, D]
            told.append(torch.tensor([self._told(f, c) for f, c in zip(order, clips, strict=True)]))
        tokens, spot, frame = _thin(torch.stack(shown), slots.keep)
        target = torch.nn.utils.rnn.pad_sequence(targets, batch_first=True)
        return StreamLesson(
            tokens, spot, frame, slots, pack(rows), kinds, target, torch.stack(told)
        )

    def _order(self, facts: int, scenes: int) -> list[bool]:
        """Which segments show a fact; the last one, which is the present, mostly does not."""
        order = [True] * facts + [False] * scenes
        self.rng.shuffle(order)
        if order[-1] and self.rng.random() < 0.6:
            at = order.index(False)
            order[at], order[-1] = True, False
        return order

    def _draw(self, order: list[bool]) -> list[int]:
        """Clips in which the name of a fact appears in that fact alone."""
        for _ in range(1000):
            scenes = [int(self.rng.integers(len(self.scenes))) for is_fact in order if not is_fact]
            common = {name for clip in scenes for name in self.scenes.names[clip]}
            facts = self._facts(sum(order), common)
            if facts is not None:
                return [facts.pop() if is_fact else scenes.pop() for is_fact in order]
        raise MmfastError("too few clips to make a stream of; give more --facts and --scenes")

    def _facts(self, count: int, common: set[int]) -> list[int] | None:
        reserved: set[int] = set()
        facts: list[int] = []
        for _ in range(40 * count):
            clip = int(self.rng.integers(len(self.facts)))
            first, *rest = self.facts.names[clip]
            if first in common | reserved or set(rest) & reserved:
                continue
            facts.append(clip)
            if len(facts) == count:
                return facts
            reserved.add(first)
            common |= set(rest)
        return None

    def _ask(
        self, order: list[bool], clips: list[int], questions: tuple[int, int]
    ) -> list[tuple[str, str, str, int]]:
        """Kind, question, answer, and 1 + the segment asked about or 0."""
        asked = []
        for at in np.flatnonzero(order):
            clip = clips[at]
            name = " ".join(NAMES[self.facts.names[clip][0]])
            for kind, answer in (
                ("entry", str(self.facts.number[clip])),
                ("corner", self.facts.corner[clip]),
            ):
                asked.append((kind, past_text(kind, name, self._any()), answer, int(at) + 1))
        chosen = [asked[i] for i in self.rng.permutation(len(asked))[: questions[0]]]
        now = (self.facts if order[-1] else self.scenes).now[clips[-1]][-1]
        # One count and one number a moment, but many colours: the former would be rarely asked.
        urge = [self.rng.random() + 0.7 * (fact.kind in ("count", "number")) for fact in now]
        for i in np.argsort(urge)[::-1][: questions[1]]:
            text = now_text(now[i], self._any())
            chosen.append((NOW[now[i].kind], text, now[i].answer, 0))
        return chosen

    def _told(self, is_fact: bool, clip: int) -> list[int]:
        if not is_fact:
            return [-100] * 4
        number = self.facts.number[clip]
        return [
            self.facts.names[clip][0],
            number // 10,
            number % 10,
            CORNERS.index(self.facts.corner[clip]),
        ]

    def _ids(self, text: str, asks: bool = False) -> list[int]:
        if text not in self.texts:
            self.texts[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return [NEWLINE, *self.texts[text]] if asks else self.texts[text]

    def _any(self) -> int:
        return int(self.rng.integers(1 << 16))


def _slots(order: list[bool], thin: bool) -> Slots:
    fact, clip, keep = [], [], []
    for number, is_fact in enumerate(order):
        for _ in range(FACT_FRAMES if is_fact else SCENE_FRAMES):
            fact.append(is_fact)
            clip.append(number)
            keep.append(THIN[not is_fact] if thin else 36)
    keep[-1] = 36  # the present is whole
    return Slots(fact, clip, keep)


def _thin(shown: Tensor, keep: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens that differ most from the mean of their frame: [B, T, P, D] to [B, N, D]."""
    batch, _, patches, width = shown.shape
    score = (shown - shown.mean(2, keepdim=True)).norm(dim=-1)  # [B, T, P]
    score = score / score.mean(-1, keepdim=True) + 0.15 * torch.randn_like(score)
    order = score.argsort(-1, descending=True)
    tokens, spots = [], []
    for frame, count in enumerate(keep):
        spot = (
            order[:, frame, :count].sort(-1).values
            if count < patches
            else torch.arange(patches).expand(batch, -1)
        )
        tokens.append(shown[:, frame].gather(1, spot[..., None].expand(-1, -1, width)))
        spots.append(spot)
    frames = torch.repeat_interleave(torch.arange(len(keep)), torch.tensor(keep))
    return torch.cat(tokens, 1), torch.cat(spots, 1), frames


__all__ = ["CORNERS", "KINDS", "NEWLINE", "USER", "Slots", "StreamLesson", "StreamSchool"]
