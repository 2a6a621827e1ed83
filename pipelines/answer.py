"""Answer: the text, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmfast.core.trace import Trace
from mmfast.planner.plan import Plan


@dataclass(frozen=True)
class Answer:
    """What a pipeline returns for one question.

    Attributes:
        text: The answer.
        trace: Rows per stage and every Reduction that was applied.
        ttft_ms: Milliseconds from the call to the first token, reading the media included.
        visual_tokens: Visual tokens the model would have got, separators not counted.
        kept_tokens: Visual tokens that were left after the last stage.
        plan: What the planner chose and predicted, where a target was given.
    """

    text: str
    trace: Trace = field(repr=False)
    ttft_ms: float = 0.0
    visual_tokens: int = 0
    kept_tokens: int = 0
    plan: Plan | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text

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
        return document
