"""All lessons of the speech model, and the order in which they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from mmfast.core.speech import Turn
from mmfast.models.speech.layout import SpeechLayout
from mmfast.models.speech.tower import SpeechTower
from mmfast.tiny.speech.bank import (
    AUDIO,
    COUNTED,
    TEXT,
    HeardSpeech,
    LineBuilder,
    PaddedBatch,
    SpokenText,
    buckets,
    chatting,
    listening,
    speaking,
    stack,
)
from mmfast.tiny.speech.net import DecoderLayer, Net

HELD = 96  # recordings of each task that are never trained on


@dataclass
class Curriculum:
    """All lessons and the order in which they are taken."""

    layout: SpeechLayout
    said: list[SpokenText]
    heard: list[HeardSpeech]
    chats: list[tuple[list[Turn], HeardSpeech, SpokenText]]
    seed: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"say": 900, "hear": 800, "chat": 850})
    held: int = HELD

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 31])
        self._queues: dict[str, Iterator[Any]] = {}

    def line(self, task: str, index: int, rng: np.random.Generator) -> LineBuilder:
        """One lesson."""
        if task == "say":
            return speaking(self.layout, self.said[index], rng)
        if task == "hear":
            return listening(self.layout, self.heard[index])
        turns, heard, said = self.chats[index]
        return chatting(self.layout, turns, heard, said, rng)

    def _lengths(self, task: str) -> list[int]:
        if task == "say":
            return [each.length for each in self.said[: -self.held]]
        if task == "hear":
            return [each.length for each in self.heard[: -self.held]]
        spoken = self.chats[: -self.held]
        return [
            heard.length + said.length + sum(len(t.text) // 4 for t in turns[:-2])
            for turns, heard, said in spoken
        ]

    def _endless(self, task: str) -> Iterator[Any]:
        lengths = self._lengths(task)
        while True:
            yield from buckets(lengths, self.tokens[task], self.rng)

    def batch(self, task: str, longest: int = 0) -> PaddedBatch:
        """The next batch of a task; where `longest` is given, none with longer sequences."""
        queue = self._queues.setdefault(task, self._endless(task))
        while True:
            lines = [self.line(task, int(i), self.rng) for i in next(queue)]
            if not longest or max(len(line.ids) for line in lines) <= longest:
                return stack(lines)

    def exam(self, task: str, size: int = 16) -> list[PaddedBatch]:
        """Lessons that are never trained on."""
        rng, many = np.random.default_rng(5), self.held
        counts = {"say": len(self.said), "hear": len(self.heard), "chat": len(self.chats)}
        count = counts[task]
        lines = [self.line(task, i, rng) for i in range(count - many, count)]
        lines.sort(key=lambda line: len(line.ids))
        return [stack(lines[i : i + size]) for i in range(0, many, size)]


MIDDLE = 6  # behind this layer the states of the ear say which word has just ended
AHEAD = 5  # tokens behind the next one that states are asked for, too
ASKED = 3  # one place in so many is
EARLY = 4  # frames of a word that count as its beginning
Part = tuple[float, int, int]  # loss, places, places guessed right


@dataclass(frozen=True)
class Weights:
    """What counts how much."""

    text: float = 1.0
    dense: float = 0.5
    books: tuple[float, ...] = (1.0, 0.5, 0.5, 0.5)
    turns: float = 1.5  # `<next>` and `<end>`
    starts: float = 2.0  # of book 0 where a word begins, beside elsewhere
    later: float = 0.08  # of each token further ahead


class TrainingModel(nn.Module):
    """Backbone, ear and the read-outs that are thrown away."""

    def __init__(
        self, net: Net, tower: SpeechTower, layout: SpeechLayout, middle: int = MIDDLE
    ) -> None:
        super().__init__()
        self.middle = middle
        self.net, self.tower = net, tower
        self.last = nn.Linear(net.shape.width, layout.texts)
        self.count = nn.Linear(net.shape.width, COUNTED + 1)
        # States that know what follows make the draft modules' guesses right.
        self.ahead = nn.Linear(net.shape.width, AHEAD * net.shape.width, bias=False)
        nn.init.zeros_(self.ahead.weight)

    def embedded(self, batch: PaddedBatch) -> Tensor:
        """Embeddings of ids and of sound `[B, L, D]`."""
        x = self.net.embed[batch.ids]
        if batch.mel is None or batch.at is None:
            return x
        heard, there = self.tower(batch.mel), batch.at >= 0
        rows = torch.arange(len(x))[:, None].expand_as(batch.at)[there]
        return x.index_put((rows, batch.at[there]), heard[there])


def losses(
    model: TrainingModel, layout: SpeechLayout, batch: PaddedBatch, weights: Weights
) -> tuple[Tensor, dict[str, Part]]:
    """The sum to be differentiated, and per part its mean, the places and those guessed right."""
    states, middle = model.net(model.embedded(batch), model.middle)
    labels = batch.ids[:, 1:]
    total, parts = states.new_zeros(()), {}
    chosen = batch.kind[:, :-1] == TEXT
    if chosen.any():
        logits = linear(states[:, :-1][chosen], model.net.head[: layout.texts])
        loss = cross_entropy(logits, labels[chosen], reduction="sum")
        total = total + weights.text * loss
        parts["text"] = _part(loss, logits, labels[chosen])
    chosen = batch.kind[:, :-1] == AUDIO
    if chosen.any():
        logits = linear(states[:, :-1][chosen], model.net.head[layout.texts :])
        target = labels[chosen] - layout.texts
        each = cross_entropy(logits, target, reduction="none")
        book = torch.where(target < 2, -1, (target - 2) // layout.entries)
        scale = torch.tensor([weights.turns, *weights.books[: layout.books]])[book + 1]
        # Which word it is shows in its first frames.
        early = (book == 0) & (ages(layout, batch.ids)[:, 1:][chosen] <= EARLY * layout.books)
        scale = torch.where(early, weights.starts * scale, scale)
        total = total + (each * scale).sum()
        for q in range(-1, layout.books):
            mine = book == q
            name = f"book{q}" if q >= 0 else "turn"
            parts[name] = _part(each[mine].sum(), logits[mine], target[mine])
        later = further(model, layout, states, batch)
        total = total + weights.later * later
    if batch.at is not None and batch.last is not None and batch.count is not None:
        there = batch.at >= 0
        rows = torch.arange(len(states))[:, None].expand_as(batch.at)[there]
        ear = middle[rows, batch.at[there]]
        for name, readout, target in (
            ("last", model.last, batch.last[there]),
            ("count", model.count, batch.count[there]),
        ):
            logits = readout(ear)
            loss = cross_entropy(logits, target, reduction="sum")
            # Most embeddings repeat what the one before said.
            total = total + weights.dense * loss / 4
            parts[name] = _part(loss, logits, target)
    return total, parts


def ages(layout: SpeechLayout, ids: Tensor) -> Tensor:
    """Audio tokens since the sound of this group began `[B, L]`: 1 at its first code."""
    sound = (ids >= layout.texts).long().cumsum(1)
    turn = (ids == layout.next) | (ids == layout.end)
    return sound - torch.where(turn, sound, 0).cummax(1).values.roll(1, 1).index_fill(
        1, torch.tensor([0]), 0
    )


def further(
    model: TrainingModel, layout: SpeechLayout, states: Tensor, batch: PaddedBatch
) -> Tensor:
    """What states know of the tokens behind the next one: a sum, as if all places were asked."""
    owed = batch.kind == AUDIO
    total = states.new_zeros(())
    shifts = model.ahead.weight.unflatten(0, (AHEAD, -1))
    for k in range(1, AHEAD + 1):
        n = batch.ids.shape[1] - 1 - k
        if n < 1:
            break
        # Text in between comes from outside: nobody drafts across it.
        whole = torch.stack([owed[:, i : i + n] for i in range(k + 1)]).all(0)
        rows, places = torch.arange(len(whole))[:, None], torch.arange(n)
        whole &= (5 * rows + places + k) % ASKED == 0
        if not whole.any():
            continue
        here = states[:, :n][whole]
        logits = linear(here + linear(here, shifts[k - 1]), model.net.head[layout.texts :])
        labels = batch.ids[:, 1 + k :][whole] - layout.texts
        total = total + cross_entropy(logits, labels, reduction="sum") * ASKED
    return total


def _part(loss: Tensor, logits: Tensor, target: Tensor) -> Part:
    right = int((logits.argmax(-1) == target).sum()) if len(target) else 0
    return float(loss.detach()), len(target), right


def matrices(model: TrainingModel) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of the layers, and everything else."""
    inner = [p for m in model.net.layers if isinstance(m, DecoderLayer) for p in m.parameters()]
    hidden = [p for p in inner if p.ndim > 1]
    known = {id(p) for p in hidden}
    return hidden, [p for p in model.parameters() if id(p) not in known]
