"""The loop that teaches the backbone and the ear: what it takes, what it owes, when it looks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from mmfast.core.speech import Turn
from mmfast.models.speech_layout import SpeechLayout
from mmfast.models.speech_tower import Tower
from mmfast.tiny.optim import Mixed, schedule
from mmfast.tiny.speech_bank import COUNTED, Heard, Said
from mmfast.tiny.speech_net import Layer, Net
from mmfast.tiny.speech_packing import (
    AUDIO,
    TEXT,
    Batch,
    Line,
    buckets,
    chatting,
    listening,
    speaking,
    stack,
)

Report = Callable[[dict[str, Any]], None]
MIDDLE = 6  # behind this layer the states of the ear say which word has just ended
THREADS = 2
AHEAD = 5  # tokens behind the next one that states are asked for, too
ASKED = 3  # one place in so many is
SHORT = 110  # tokens of the sentences at the start
HELD = 96  # recordings of each task that are never trained on


@dataclass
class School:
    """All lessons and the order in which they are taken."""

    layout: SpeechLayout
    said: list[Said]
    heard: list[Heard]
    chats: list[tuple[list[Turn], Heard, Said]]
    seed: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"say": 900, "hear": 800, "chat": 900})

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 31])
        self._queues: dict[str, Iterator[Any]] = {}
        self.easy = True

    def line(self, task: str, index: int, rng: np.random.Generator) -> Line:
        """One lesson."""
        if task == "say":
            return speaking(self.layout, self.said[index], rng)
        if task == "hear":
            return listening(self.layout, self.heard[index])
        turns, heard, said = self.chats[index]
        return chatting(self.layout, turns, heard, said, rng)

    def _lengths(self, task: str) -> list[int]:
        if task == "say":
            return [each.length for each in self.said[:-HELD]]
        if task == "hear":
            return [each.length for each in self.heard[:-HELD]]
        spoken = self.chats[:-HELD]
        return [
            heard.length + said.length + sum(len(t.text) // 4 for t in turns[:-2])
            for turns, heard, said in spoken
        ]

    def _endless(self, task: str) -> Iterator[Any]:
        lengths = self._lengths(task)
        while True:
            yield from buckets(lengths, self.tokens[task], self.rng)

    def batch(self, task: str, longest: int = 0) -> Batch:
        """The next batch of a task; where `longest` is given, none with longer sequences."""
        queue = self._queues.setdefault(task, self._endless(task))
        while True:
            lines = [self.line(task, int(i), self.rng) for i in next(queue)]
            if not longest or max(len(line.ids) for line in lines) <= longest:
                return stack(lines)

    def exam(self, task: str, size: int = 16) -> list[Batch]:
        """Lessons that are never trained on."""
        rng, many = np.random.default_rng(5), HELD
        count = len({"say": self.said, "hear": self.heard, "chat": self.chats}[task])
        lines = [self.line(task, i, rng) for i in range(count - many, count)]
        lines.sort(key=lambda line: len(line.ids))
        return [stack(lines[i : i + size]) for i in range(0, many, size)]


@dataclass(frozen=True)
class Weights:
    """What counts how much."""

    text: float = 1.0
    dense: float = 0.5
    books: tuple[float, ...] = (1.0, 0.8, 0.6, 0.5)
    turns: float = 1.5  # `<next>` and `<end>`
    later: float = 0.12  # of each token further ahead


class Model(nn.Module):
    """Backbone, ear and the read-outs that are thrown away."""

    def __init__(self, net: Net, tower: Tower, layout: SpeechLayout) -> None:
        super().__init__()
        self.net, self.tower = net, tower
        self.last = nn.Linear(net.shape.width, layout.texts)
        self.count = nn.Linear(net.shape.width, COUNTED + 1)
        # States that know what follows make the draft modules' guesses right.
        self.ahead = nn.Linear(net.shape.width, AHEAD * net.shape.width, bias=False)
        nn.init.zeros_(self.ahead.weight)

    def embedded(self, batch: Batch) -> Tensor:
        """Embeddings of ids and of sound `[B, L, D]`."""
        x = self.net.embed[batch.ids]
        if batch.mel is None or batch.at is None:
            return x
        heard, there = self.tower(batch.mel), batch.at >= 0
        rows = torch.arange(len(x))[:, None].expand_as(batch.at)[there]
        return x.index_put((rows, batch.at[there]), heard[there])


def losses(
    model: Model, layout: SpeechLayout, batch: Batch, weights: Weights
) -> tuple[Tensor, dict[str, tuple[float, int, int]]]:
    """The sum to be differentiated, and per part its mean, the places and those guessed right."""
    states, middle = model.net(model.embedded(batch), MIDDLE)
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


def further(model: Model, layout: SpeechLayout, states: Tensor, batch: Batch) -> Tensor:
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


def _part(loss: Tensor, logits: Tensor, target: Tensor) -> tuple[float, int, int]:
    right = int((logits.argmax(-1) == target).sum()) if len(target) else 0
    return float(loss.detach()), len(target), right


def matrices(model: Model) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Matrices of the layers, and everything else."""
    inner = [p for m in model.net.layers if isinstance(m, Layer) for p in m.parameters()]
    hidden = [p for p in inner if p.ndim > 1]
    known = {id(p) for p in hidden}
    return hidden, [p for p in model.parameters() if id(p) not in known]


@dataclass(frozen=True)
class Course:
    """A stage of the training: its tasks, in every step, and its length."""

    name: str
    tasks: tuple[str, ...]
    minutes: float
    rate: float = 2e-3
    hold: float = 0.5
    warm: float = 0.03
    short: float = 0.0  # share of the stage with short sentences alone
    watch: float = 3.0  # minutes between looks


class Trainer:
    """Takes courses; keeps model, optimiser and figures between them."""

    def __init__(self, model: Model, school: School, rate: float) -> None:
        self.model, self.school = model, school
        self.parameters = list(model.parameters())
        # A batch per core, each on one thread: no core waits for another within a step.
        torch.set_num_threads(1)
        self.pool = ThreadPoolExecutor(THREADS)
        hidden, rest = matrices(model)
        self.optimiser = Mixed(hidden, rest, rate)
        self.steps, self.spent = 0, 0.0

    def train(
        self, course: Course, report: Report, save: Callable[[], None], spent: float = 0.0
    ) -> None:
        """Take a course; `spent` seconds of it are over already."""
        start = looked = time.monotonic() - spent
        looked += spent
        seen: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        tokens = 0
        while (now := time.monotonic() - start) < 60 * course.minutes:
            self.spent = now
            done = now / (60 * course.minutes)
            tokens += self.step(course, done, seen)
            self.steps += 1
            if self.steps % 20 == 0:
                rate = round(tokens / (time.monotonic() - start - spent))
                report(
                    {"stage": course.name, "step": self.steps, "seconds": round(now), "rate": rate}
                    | _means(seen)
                )
                seen.clear()
            if time.monotonic() - looked > 60 * course.watch:
                looked = time.monotonic()
                report({"stage": "held-out", "step": self.steps, **self.look(course.tasks)})
                save()
        report({"stage": "held-out", "step": self.steps, **self.look(course.tasks)})
        save()

    def state(self) -> dict[str, Any]:
        """All that is needed to go on."""
        return {
            "model": self.model.state_dict(),
            "adam": self.optimiser.adam.state_dict(),
            "momentum": list(self.optimiser.momentum.values()),
            "steps": self.steps,
            "spent": self.spent,
        }

    def restore(self, state: dict[str, Any]) -> float:
        """Go on from there; returns the seconds spent."""
        self.model.load_state_dict(state["model"])
        self.optimiser.adam.load_state_dict(state["adam"])
        self.optimiser.momentum = dict(zip(self.optimiser.momentum, state["momentum"], strict=True))
        self.steps, self.spent = int(state["steps"]), float(state["spent"])
        self.school.rng = np.random.default_rng([self.school.seed, 31, self.steps])
        return self.spent

    def step(
        self, course: Course, done: float, seen: dict[str, list[tuple[float, int, int]]]
    ) -> int:
        """One update; returns the tokens."""
        longest = SHORT if done < course.short else 0
        batches = [
            self.school.batch(task, longest if task == "say" else 0) for task in course.tasks
        ]
        found = list(self.pool.map(self._gradients, course.tasks, batches))
        for parameter, *parts in zip(self.parameters, *(grads for grads, _ in found), strict=True):
            known = [part for part in parts if part is not None]
            parameter.grad = sum(known[1:], known[0]) if known else None
        for task, (_, figures) in zip(course.tasks, found, strict=True):
            for name, part in figures.items():
                seen[f"{task} {name}"].append(part)
        self.optimiser.step(schedule(done, course.warm, course.hold), over=self.pool.map)
        return sum(batch.ids.numel() for batch in batches)

    def _gradients(
        self, task: str, batch: Batch
    ) -> tuple[tuple[Tensor | None, ...], dict[str, tuple[float, int, int]]]:
        """One batch's share of the gradient; runs in a thread of its own."""
        total, parts = losses(self.model, self.school.layout, batch, Weights())
        owed = sum(parts[name][1] for name in parts if name not in ("last", "count"))
        loss = total / max(owed, 1) * SHARES[task]
        return torch.autograd.grad(loss, self.parameters, allow_unused=True), parts

    @torch.no_grad()
    def look(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Losses and shares right on lessons that are never trained on."""
        seen: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        for task in dict.fromkeys(tasks):
            for batch in self.school.exam(task):
                for name, part in losses(self.model, self.school.layout, batch, Weights())[
                    1
                ].items():
                    seen[f"{task} {name}"].append(part)
        return _means(seen)


SHARES = {"say": 1.0, "hear": 1.0, "chat": 0.7}


def _means(seen: dict[str, list[tuple[float, int, int]]]) -> dict[str, Any]:
    """Per part its mean loss and share right."""
    found = {}
    for name, parts in seen.items():
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        if count:
            found[name] = [round(loss / count, 3), round(right / count, 3)]
    return found
