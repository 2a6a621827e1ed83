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
from mmfast.models.loading import embedded_path
from mmfast.planner.calibrate import Tick
from mmfast.planner.candidates import DOCUMENT_SHARE, Candidate, Rejected, candidates
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
        work = work_of(self.model, inputs)
        with self.learner.aside():
            self._evidence(target.kind or kind)  # the first time it imports every method
        self.learner.learn(inputs, work, call, run, tick)
        return self.decide(work, target, call, spent, strict, kind)

    def decide(
        self,
        work: Work,
        target: Target,
        call: str = "generate",
        spent: float = 0.0,
        strict: bool = True,
        kind: str = "video",
    ) -> Plan:
        """Choose with the rates as they are; arguments as for `plan`."""
        begin, measured = time.perf_counter(), self.learner.measuring_ms
        evidence = self._evidence(target.kind or kind)
        while True:
            found, rejected = self._candidates(evidence, work, target.kind or kind, call)
            measuring = self.learner.measuring_ms - measured
            gone = spent + (time.perf_counter() - begin) * 1e3 - measuring
            choice, steps = choose(found, target, gone)
            unpriced = [s for s in steps if not self.learner.priced(s.stages, work)]
            if not unpriced:
                break
            for step in unpriced:
                self.learner.price(step.stages, work)
        met = choice is not None
        if choice is None:
            choice = _best_effort(steps, target, gone, strict)
        why = reasons(choice, steps, found, target, evidence, work, gone)
        return plan_of(choice, found[0], work, (spent, gone - spent), met, why, rejected)

    def _candidates(
        self, evidence: Evidence, work: Work, kind: str, call: str
    ) -> tuple[list[Candidate], list[Rejected]]:
        depth = self.learner.bench.shape.depth
        whole = depth == len(self.model.get_decoder().layers)
        return candidates(
            evidence,
            work,
            depth,
            lambda stages: self.learner.cost(work, stages, call),
            lambda stages: check_sites(expand(stages, depth), self.model) if whole else None,
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
