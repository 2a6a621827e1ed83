"""The planner of one model: weighs candidates against a target and says why.

planner = Planner(model)
plan = planner.plan(inputs, make_target(target_ttft_ms=300))
with attach(model, plan.spec): ...
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmfast.attach import check_sites
from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.schedule import expand
from mmfast.core.spec import Spec
from mmfast.models.loading import embedded_path
from mmfast.planner.calibrate import Tick
from mmfast.planner.candidates import DOCUMENT_SHARE, Candidate, Rejected, candidates, passed_over
from mmfast.planner.choose import choose
from mmfast.planner.evidence import Evidence, Row, evidence_for
from mmfast.planner.explain import reasons, refusal
from mmfast.planner.learner import Learner, Run
from mmfast.planner.plan import Plan, plan_of
from mmfast.planner.rates import Rates
from mmfast.planner.shape import Shape
from mmfast.planner.target import Target
from mmfast.planner.work import Work, work_of


class PlanWarning(UserWarning):
    """A latency target is out of reach; the fastest plan runs."""


class Planner:
    """Plans for one model on its device.

    Args:
        model: A transformers model of a known family.
        name: Its name in the accuracy rows.
        rows: Accuracy rows; those of the package if None.
        rates: Known rates; None reads those of earlier runs.
        shape: Its shape, where the model at hand is cut down to fewer layers.
        remember: Keep what is measured for later runs.
    """

    def __init__(
        self,
        model: Any,
        name: str | None = None,
        rows: Sequence[Row] | None = None,
        rates: Rates | None = None,
        shape: Shape | None = None,
        remember: bool = True,
    ) -> None:
        self.model, self.name, self.rows = model, name, rows
        self.learner = Learner(model, rates, shape, remember)
        self._known: dict[str, Evidence] = {}
        self._planning_ms: float | None = None

    def plan(
        self,
        inputs: Mapping[str, Any],
        target: Target,
        call: str = "generate",
        run: Run | None = None,
        spent: float = 0.0,
        strict: bool = True,
        kind: str = "video",
        tick: Tick | None = None,
    ) -> Plan:
        """Choose for one request.

        Args:
            inputs: What the processor returned.
            target: The limits; without any, the stock model is the plan.
            call: What is called: `generate` or `forward`.
            run: Runs one call for real, so that the overhead of short calls can be learnt.
            spent: Milliseconds gone since the caller started to wait.
            strict: Refuse a latency target that is out of reach; else warn and take the fastest.
            kind: The kind of media, unless the target names one.
            tick: Called with (steps done, steps, what is measured) while the device is measured.

        Raises:
            MmfastError: No plan meets the target; says what the best one reaches.
            ModelError: The family is unknown, or the inputs hold nothing visual.
        """
        work, media = work_of(self.model, inputs), target.kind or kind
        with self.learner.aside():
            self.learner.learn(inputs, work, call, run, tick)
            if self._planning_ms is None:
                # The first time imports every method and measures what choosing takes.
                self._weigh(work, target, call, spent, media)
                self._planning_ms = self._time(work, target, call, spent, media)
        return self.decide(work, target, call, spent, strict, media, self._planning_ms)

    def _time(self, *request: Any) -> float:
        start = time.perf_counter()
        self._weigh(*request)
        return (time.perf_counter() - start) * 1e3

    def decide(
        self,
        work: Work,
        target: Target,
        call: str = "generate",
        spent: float = 0.0,
        strict: bool = True,
        kind: str = "video",
        planning: float = 0.0,
    ) -> Plan:
        """Choose with the rates as they are.

        Args:
            work: The request.
            target: See `plan`; so are the others.
            call: What is called.
            spent: Milliseconds gone already.
            strict: Refuse a latency target that is out of reach.
            kind: The kind of media.
            planning: Milliseconds that choosing takes.
        """
        gone, kind = spent + planning, target.kind or kind
        choice, steps, found, rejected = self._weigh(work, target, call, gone, kind)
        met = choice is not None
        if choice is None:
            choice = _best_effort(steps, target, gone, strict)
        evidence, depth = self._evidence(kind), self.learner.bench.shape.depth
        rejected += passed_over(choice, evidence, depth, rejected)
        why = reasons(choice, steps, found, target, evidence, work, gone)
        return plan_of(choice, found[0], work, (spent, planning), met, why, rejected)

    def _weigh(
        self, work: Work, target: Target, call: str, gone: float, kind: str
    ) -> tuple[Candidate | None, list[Candidate], list[Candidate], list[Rejected]]:
        """The choice, the ladder it stands on, all candidates, and what is out of question."""
        while True:
            found, rejected = self._candidates(self._evidence(kind), work, kind, call)
            choice, steps = choose(found, target, gone)
            unpriced = [s for s in steps if not self.learner.priced(s.stages, work)]
            if not unpriced:
                return choice, steps, found, rejected
            for step in unpriced:
                self.learner.price(step.stages, work)

    def _candidates(
        self, evidence: Evidence, work: Work, kind: str, call: str
    ) -> tuple[list[Candidate], list[Rejected]]:
        depth = self.learner.bench.shape.depth

        def check(stages: tuple[Spec, ...]) -> None:
            self.learner.check(stages, work)
            if depth == len(self.model.get_decoder().layers):  # else it is a model cut down
                check_sites(expand(stages, depth), self.model)

        return candidates(
            evidence,
            work,
            depth,
            lambda stages: self.learner.cost(work, stages, call),
            check,
            DOCUMENT_SHARE if kind == "document" != evidence.kind else 0.0,
        )

    def _evidence(self, kind: str) -> Evidence:
        if kind not in self._known:
            found = evidence_for(kind, self.rows, self.name, _embedded_layers)
            self._known[kind] = found or Evidence(1.0, (), "no accuracy rows", kind)
        return self._known[kind]


def _best_effort(
    steps: Sequence[Candidate], target: Target, spent: float, strict: bool
) -> Candidate:
    """The fastest step that meets every limit but the latency.

    Raises:
        MmfastError: There is none, or `strict` asks for no less than the target.
    """
    message = refusal(steps, target, spent)
    late = target.ttft_ms is not None and bool(steps)
    choice = choose(steps, replace(target, ttft_ms=None))[0] if late else None
    if strict or choice is None:
        raise MmfastError(message)
    warnings.warn(f"{message}; running the fastest plan", PlanWarning, stacklevel=6)
    return min((s for s in steps if s.cost.mean <= choice.cost.mean), key=lambda s: s.cost.ttft)


def _embedded_layers(name: str) -> int | None:
    """Decoder layers of an embedded model; None where it is another one."""
    try:
        config = json.loads((embedded_path(name) / "config.json").read_text(encoding="utf-8"))
    except ModelError:
        return None
    return int(config["text_config"]["num_hidden_layers"])
