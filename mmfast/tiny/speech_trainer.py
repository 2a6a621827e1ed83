"""The loop that teaches the backbone and the ear: a batch per core and task, looks in between."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.tiny.optim import Mixed, schedule
from mmfast.tiny.speech_losses import Model, Part, Weights, losses, matrices
from mmfast.tiny.speech_packing import Batch
from mmfast.tiny.speech_school import School

Report = Callable[[dict[str, Any]], None]
THREADS = 2
SHORT = 110  # tokens of the sentences at the start
SHARES = {"say": 1.0, "hear": 1.0, "chat": 0.7}


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
        seen: dict[str, list[Part]] = defaultdict(list)
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

    def step(self, course: Course, done: float, seen: dict[str, list[Part]]) -> int:
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
    ) -> tuple[tuple[Tensor | None, ...], dict[str, Part]]:
        """One batch's share of the gradient; runs in a thread of its own."""
        total, parts = losses(self.model, self.school.layout, batch, Weights())
        owed = sum(parts[name][1] for name in parts if name not in ("last", "count"))
        loss = total / max(owed, 1) * SHARES[task]
        return torch.autograd.grad(loss, self.parameters, allow_unused=True), parts

    @torch.no_grad()
    def look(self, tasks: Sequence[str]) -> dict[str, Any]:
        """Losses and shares right on lessons that are never trained on."""
        seen: dict[str, list[Part]] = defaultdict(list)
        for task in dict.fromkeys(tasks):
            for batch in self.school.exam(task):
                for name, part in losses(self.model, self.school.layout, batch, Weights())[
                    1
                ].items():
                    seen[f"{task} {name}"].append(part)
        return _means(seen)


def _means(seen: dict[str, list[Part]]) -> dict[str, Any]:
    """Per part its mean loss and share right."""
    found = {}
    for name, parts in seen.items():
        loss, count, right = (sum(column) for column in zip(*parts, strict=True))
        if count:
            found[name] = [round(loss / count, 3), round(right / count, 3)]
    return found
