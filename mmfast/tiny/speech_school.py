"""All lessons of the speech model, and the order in which they are taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmfast.core.speech import Turn
from mmfast.models.speech_layout import SpeechLayout
from mmfast.tiny.speech_bank import Heard, Said
from mmfast.tiny.speech_packing import Batch, Line, buckets, chatting, listening, speaking, stack

HELD = 96  # recordings of each task that are never trained on


@dataclass
class School:
    """All lessons and the order in which they are taken."""

    layout: SpeechLayout
    said: list[Said]
    heard: list[Heard]
    chats: list[tuple[list[Turn], Heard, Said]]
    seed: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"say": 900, "hear": 800, "chat": 850})
    held: int = HELD

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng([self.seed, 31])
        self._queues: dict[str, Iterator[Any]] = {}

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

    def batch(self, task: str, longest: int = 0) -> Batch:
        """The next batch of a task; where `longest` is given, none with longer sequences."""
        queue = self._queues.setdefault(task, self._endless(task))
        while True:
            lines = [self.line(task, int(i), self.rng) for i in next(queue)]
            if not longest or max(len(line.ids) for line in lines) <= longest:
                return stack(lines)

    def exam(self, task: str, size: int = 16) -> list[Batch]:
        """Lessons that are never trained on."""
        rng, many = np.random.default_rng(5), self.held
        counts = {"say": len(self.said), "hear": len(self.heard), "chat": len(self.chats)}
        count = counts[task]
        lines = [self.line(task, i, rng) for i in range(count - many, count)]
        lines.sort(key=lambda line: len(line.ids))
        return [stack(lines[i : i + size]) for i in range(0, many, size)]
