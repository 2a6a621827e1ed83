"""Answers of pipelines about media: whole, and as they are written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mmfast.core.trace import Trace
from mmfast.models.doubt import Doubt
from mmfast.planner.plan import Plan


@dataclass(frozen=True)
class Answer:
    """The answer to one question, with its trace and its figures.

    `trace` has rows per stage and every Reduction that was applied. `ttft_ms` counts from the call
    to the first token, reading the media included. `visual_tokens` are those the model would have
    got, separators not counted, `kept_tokens` those left after the last stage. `plan` is what the
    planner chose and predicted, where a target was given. `note` says what of the input is unlike
    all that the embedded model was trained on. `doubts` are, with `check=True`, the pieces of the
    answer in order, each with the probability that it is made up.
    """

    text: str
    trace: Trace = field(repr=False)
    ttft_ms: float = 0.0
    visual_tokens: int = 0
    kept_tokens: int = 0
    plan: Plan | None = field(default=None, repr=False)
    note: str = ""
    doubts: tuple[Doubt, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        return self.text

    @property
    def noted(self) -> dict[str, list[str]]:
        """As of the trace, with `note` before them."""
        notes = [*filter(None, [self.note]), *self.trace.notes]
        return {"notes": notes} if notes else {}

    def to_dict(self) -> dict[str, Any]:
        """The document that `mmfast ask --json` prints."""
        document = {
            "answer": self.text,
            "ttft_ms": round(self.ttft_ms, 3),
            "visual_tokens": self.visual_tokens,
            "kept_tokens": self.kept_tokens,
            "trace": self.trace.to_dict()["rows"],
        }
        if self.plan is not None:
            document["plan"] = self.plan.to_dict(self.ttft_ms)
        if self.doubts:
            document["doubts"] = [[each.text, round(each.chance, 4)] for each in self.doubts]
        return document | ({"note": self.note} if self.note else {}) | self.noted


class AnswerStream(Iterator[str]):
    """Text deltas of an answer, which joined are its text; `close()` ends it early."""

    def __init__(self, deltas: Iterator[str], told: Sequence[Answer]) -> None:
        self._deltas, self._told = deltas, told  # which is filled while deltas are read

    def __next__(self) -> str:
        return next(self._deltas)

    def close(self) -> None:
        """Stop the generation; `answer` has what was written until then."""
        self._deltas.close()  # type: ignore[attr-defined]

    @property
    def answer(self) -> Answer | None:
        """The answer with its trace; None until the deltas have ended."""
        return self._told[0] if self._told else None
