"""The planner beside a pipeline: what it plans for, and how it tries a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mmfast.attach import attach, turn_of
from mmfast.models.cost import FirstToken
from mmfast.planner.auto import announced, row_name
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner
from mmfast.planner.target import Target

Tick = Callable[[int, int, str | None], None]


class PipelinePlanner:
    """Plans the calls of one pipeline; measures the device when the first plan is asked for."""

    def __init__(self, pipe: Any, name: Any) -> None:
        self.pipe = pipe
        known = isinstance(name, (str, Path))
        self.planner = Planner(pipe.model, row_name(name) if known or name is None else None)

    def plan(
        self,
        inputs: Mapping[str, Any],
        items: Sequence[int],
        target: Target,
        started: float,
        strict: bool = False,
        tick: Tick | None = None,
        answer: int = 0,
    ) -> tuple[Plan, float]:
        """A plan, and the milliseconds that measuring the device took on the way.

        `answer` is the longest answer in tokens.
        """
        spent = (time.perf_counter() - started) * 1e3
        kind = "video" if "pixel_values_videos" in inputs else "image"
        if kind == "image" and max(items) > 1:
            kind = "multi-image"
        before = self.planner.learner.measuring_ms
        shown = nullcontext(tick) if tick else announced(self.planner.learner)
        with turn_of(self.pipe.model), shown as tick:
            plan = self.planner.plan(
                inputs,
                target,
                run=lambda spec: self._try(inputs, spec),
                spent=spent,
                strict=strict,
                kind=kind,
                tick=tick,
                answer=answer,
                caches=self._bare,
            )
        return plan, self.planner.learner.measuring_ms - before

    @property
    def _bare(self) -> bool:
        """The pipeline has no KV policy of its own, nor what does not go with one."""
        parts = (getattr(self.pipe, name, None) for name in ("cache", "decode", "reuse"))
        return all(part is None for part in parts)

    def _try(self, inputs: Mapping[str, Any], spec: str | None) -> float:
        first, start = FirstToken(), time.perf_counter()
        with attach(self.pipe.model, spec, self.pipe.cache, self.pipe.encoder):
            self.pipe.run(dict(inputs), streamer=first, max_new_tokens=1)
        return (first.at - start) * 1e3
