"""The part of the batched lane before prefill: requests on their way through the vision tower."""

from __future__ import annotations

from collections.abc import Iterator

from mmfast.serve.engine.answer import Answer
from mmfast.serve.engine.encoder import Encoder, Result, Steps

_END = object()
Made = tuple[Answer, Result]


class Tower:
    """Requests that wait for embeddings, and the call that makes them.

    Args:
        encoder: Makes embeddings.
    """

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._waiting: dict[str, Answer] = {}
        self._call: tuple[Steps, list[Answer | None]] | None = None

    @property
    def answers(self) -> list[Answer]:
        """All requests that are here."""
        called = [answer for answer in self._call[1] if answer] if self._call else []
        return [*list(self._waiting.values()), *called]  # health is of any thread

    @property
    def under_way(self) -> bool:
        """Whether a call is under way."""
        return self._call is not None

    @property
    def waits(self) -> bool:
        """Whether somebody waits for the next call."""
        return bool(self._waiting)

    def add(self, answer: Answer) -> None:
        """Take a request in."""
        self._waiting[answer.id] = answer

    def cancel(self, name: str) -> Answer | None:
        """Let a request go; a call that is nobody's any more ends."""
        answer = self._waiting.pop(name, None)
        batch = self._call[1] if self._call else []
        for i, each in enumerate(batch):
            if each is not None and each.id == name:
                answer, batch[i] = each, None
        if self._call is not None and not any(batch):
            self._call[0].close()
            self._call = None
        return answer

    def texts(self) -> Iterator[Made]:
        """Requests without media: they need no tower, and wait for nobody's call of it."""
        for answer in list(self._waiting.values()):
            prepared = answer.prepared
            if prepared is not None and not prepared.media:
                del self._waiting[answer.id]
                yield answer, self.encoder.encode([prepared])[0]

    def step(self, budget: float | None) -> Made | None:
        """A slice of the call, which begins with all that wait; what became of one of them.

        Args:
            budget: Seconds after which the call stops at the next block; None never stops it.
        """
        if self._call is None:
            fresh = [a for a in self._waiting.values() if a.prepared is not None]
            self._waiting.clear()
            prepared = [a.prepared for a in fresh if a.prepared is not None]
            self._call = self.encoder.steps(prepared), [*fresh]
        steps, batch = self._call
        self.encoder.slicer.budget = budget
        step = next(steps, _END)
        if step is _END:
            self._call = None
        elif isinstance(step, tuple):
            answer, batch[step[0]] = batch[step[0]], None
            return None if answer is None else (answer, step[1])
        return None
