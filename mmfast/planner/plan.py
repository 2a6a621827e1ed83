"""A plan: what to run, what it should cost, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmfast.planner.candidates import Rejected


@dataclass(frozen=True)
class Plan:
    """The planner's choice for one request."""

    spec: str | None  # spec string; None reduces nothing
    ttft_ms: Mapping[str, float]  # predicted: read, plan, encode, select, prefill, overhead
    visual_tokens: int  # visual tokens of the request
    kept_tokens: int  # those left after the last stage
    mean_tokens: float  # visual tokens of a prompt in a decoder layer, mean over both
    memory: Mapping[str, int]  # predicted bytes by part: `weights`, `kv`, `activations`
    accuracy: tuple[float | None, float | None] = (None, None)  # at this budget; of all tokens
    met: bool = True  # every limit is met
    why: tuple[str, ...] = ()  # the choice in plain sentences
    rejected: tuple[Rejected, ...] = ()  # methods and steps that were not taken, with the reason
    cache: str | None = None  # spec string of a KV policy, which is taken in place of reducers
    rungs: tuple[str | None, ...] = ()  # of a check: the first choice, then specs that keep more
    raised: int = 0  # rungs that were asked for beyond the first choice
    note: str = ""  # for the trace, where the choice is not the one that was asked for

    @property
    def rung(self) -> int:
        """Place of `spec` among the rungs."""
        return min(self.raised, len(self.rungs) - 1)

    @property
    def total_ms(self) -> float:
        """Predicted milliseconds to the first token."""
        return sum(self.ttft_ms.values())

    @property
    def total_bytes(self) -> int:
        """Predicted bytes."""
        return sum(self.memory.values())

    def to_dict(self, measured_ms: float | None = None) -> dict[str, Any]:
        """The document that `mmfast plan --json` prints, beside the time that was measured."""
        parts = {name: round(ms, 3) for name, ms in self.ttft_ms.items()}
        document: dict[str, Any] = {
            "reduce": self.spec,
            "cache": self.cache,
            "predicted_ttft_ms": {"total": round(self.total_ms, 3), **parts},
            "visual_tokens": self.visual_tokens,
            "kept_tokens": self.kept_tokens,
            "mean_tokens": round(self.mean_tokens, 1),
            "memory_bytes": {"total": self.total_bytes, **self.memory},
            "accuracy": {"planned": self.accuracy[0], "all_tokens": self.accuracy[1]},
            "met": self.met,
            "why": list(self.why),
            "rejected": [{"reduce": r.spec, "reason": r.reason} for r in self.rejected],
        }
        if measured_ms is not None:
            document["measured_ttft_ms"] = round(measured_ms, 3)
            document["measured_over_predicted"] = round(measured_ms / self.total_ms, 3)
        return document
