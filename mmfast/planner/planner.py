"""The planner of one model: measures what it must, weighs candidates, says why.

planner = Planner(model)
plan = planner.plan(inputs, make_target(target_ttft_ms=300))
with attach(model, plan.spec): ...
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmfast.attach import check_sites
from mmfast.core.errors import MmfastError, ModelError
from mmfast.core.schedule import expand
from mmfast.core.spec import Spec, parse
from mmfast.models.adapter import tower_of
from mmfast.models.loading import embedded_path
from mmfast.planner.calibrate import Bench, Tick, decoder_rates
from mmfast.planner.candidates import DOCUMENT_SHARE, Candidate, Rejected, candidates
from mmfast.planner.choose import choose
from mmfast.planner.cost import Cost, predict, select_key
from mmfast.planner.encoder import encoder_rates
from mmfast.planner.evidence import Evidence, Row, evidence_for
from mmfast.planner.explain import reasons, refusal
from mmfast.planner.plan import Plan
from mmfast.planner.rates import Rates
from mmfast.planner.selection import selection_ms
from mmfast.planner.shape import Shape, fingerprint, shape_of
from mmfast.planner.store import rates_key, read_rates, write_rates
from mmfast.planner.target import Target
from mmfast.planner.work import Work, work_of

Run = Callable[[str | None], float]  # spec -> measured ms to the first token, inputs ready
PROBE = "uniform:0.25"  # chooses in no time: what a reduced call takes beside choosing
SHORT_MS = 2000.0  # calls predicted to be this short are run, to learn their overhead


class PlanWarning(UserWarning):
    """A latency target is out of reach; the fastest plan runs."""


class Planner:
    """Plans for one model on its device.

    Args:
        model: A transformers model of a known family.
        name: Its name in the accuracy rows; the embedded model's by default.
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
        self.bench = Bench(model, shape or shape_of(model, _blocks(model)))
        self.key: dict[str, Any] | None = None
        if remember:
            self.key = rates_key(self.bench.device, self.bench.dtype, fingerprint(model))
        known = read_rates(self.key) if self.key is not None and rates is None else rates
        self.rates = known or Rates()

    def learn(
        self,
        inputs: Mapping[str, Any],
        work: Work,
        call: str = "generate",
        run: Run | None = None,
        tick: Tick | None = None,
    ) -> None:
        """Measure what is not known yet about calls of this size.

        Args:
            inputs: What the processor returned.
            work: The request they make.
            call: What `run` calls: `generate` or `forward`.
            run: Runs one call for real, where calls are short.
            tick: Called with (steps done, steps, what is measured).
        """
        before = self.rates
        self.rates = decoder_rates(self.bench, self.rates, work.prompt * work.rows, tick)
        if work.pixels:
            if tick is not None:
                tick(0, 1, "the encoder")
            self.rates = encoder_rates(self.bench, self.rates, inputs)
        if run is not None and call not in self.rates.overhead:
            self._learn_overhead(work, call, run)
        self._save(before)

    def _learn_overhead(self, work: Work, call: str, run: Run) -> None:
        """What short calls take beside what is predicted; long ones drown it."""
        found = []
        for text in (None, PROBE):
            cost = self.cost(work, parse(text), call)
            if cost.ttft > SHORT_MS:
                return
            run(text)
            times = sorted(run(text) for _ in range(5))
            found.append(times[2] - cost.ttft)  # below 0 where layers are faster in place
        self.rates = self.rates.gain(overhead={call: tuple(found)})

    def cost(self, work: Work, stages: Sequence[Spec], call: str = "generate") -> Cost:
        """Predict one call under a parsed spec."""
        return predict(self.bench.shape, self.rates, work, stages, call)

    def price_selection(self, stages: Sequence[Spec], work: Work) -> None:
        """Measure what choosing takes, where that is not known."""
        for stage in stages:
            key = select_key(stage, work)
            if key not in self.rates.select:
                ms = selection_ms(self.bench, stage, work)
                self.rates = self.rates.gain(select={key: ms})

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
            call: See `learn`.
            run: See `learn`.
            spent: Milliseconds gone since the caller started to wait.
            strict: Refuse a latency target that is out of reach; else warn and take the fastest.
            kind: The kind of media, unless the target names one.
            tick: See `learn`.

        Raises:
            MmfastError: No plan meets the target; says what the best one reaches.
            ModelError: The family is unknown, or the inputs hold nothing visual.
        """
        work = work_of(self.model, inputs)
        self.learn(inputs, work, call, run, tick)
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
        evidence, depth = self._evidence(target.kind or kind), self.bench.shape.depth
        floor = DOCUMENT_SHARE if (target.kind or kind) == "document" != evidence.kind else 0.0
        while True:
            found, rejected = candidates(
                evidence,
                work,
                depth,
                lambda stages: self.cost(work, stages, call),
                lambda stages: check_sites(expand(stages, depth), self.model),
                floor,
            )
            choice, steps = choose(found, target, spent)
            unpriced = [s for s in steps if not self._priced(s, work)]
            if not unpriced:
                break
            before = self.rates
            for step in unpriced:
                self.price_selection(step.stages, work)
            self._save(before)
        met = choice is not None
        if choice is None:
            choice = self._best_effort(steps, target, spent, strict)
        why = reasons(choice, steps, found, target, evidence, work, spent)
        return self._plan(choice, found[0], work, spent, met, why, rejected)

    def _priced(self, step: Candidate, work: Work) -> bool:
        return all(select_key(stage, work) in self.rates.select for stage in step.stages)

    def _best_effort(
        self, steps: Sequence[Candidate], target: Target, spent: float, strict: bool
    ) -> Candidate:
        message = refusal(steps, target, spent)
        late = target.ttft_ms is not None and bool(steps)
        hard = replace(target, ttft_ms=None)
        choice = choose(steps, hard)[0] if late else None
        if strict or choice is None:
            raise MmfastError(message)
        fitting = [s for s in steps if s.cost.mean <= choice.cost.mean]
        warnings.warn(f"{message}; running the fastest plan", PlanWarning, stacklevel=4)
        return fitting[-1]

    def _plan(
        self,
        choice: Candidate,
        stock: Candidate,
        work: Work,
        spent: float,
        met: bool,
        why: tuple[str, ...],
        rejected: Sequence[Rejected],
    ) -> Plan:
        cost = choice.cost
        parts = ("encode", "select", "prefill", "overhead")
        return Plan(
            spec=choice.spec,
            ttft_ms={"read": spent, **{name: getattr(cost, name) for name in parts}},
            visual_tokens=work.visual,
            kept_tokens=cost.kept,
            mean_tokens=cost.mean,
            memory={name: getattr(cost, name) for name in ("weights", "kv", "activations")},
            accuracy=(choice.accuracy, stock.accuracy),
            met=met,
            why=why,
            rejected=tuple(rejected),
        )

    def _evidence(self, kind: str) -> Evidence:
        found = evidence_for(kind, self.rows, self.name, _embedded_layers)
        return found or Evidence(1.0, (), "no accuracy rows", kind)

    def _save(self, before: Rates) -> None:
        if self.key is not None and self.rates != before:
            write_rates(self.key, self.rates)


def _blocks(model: Any) -> int:
    try:
        return len(tower_of(model).blocks)
    except (ModelError, StopIteration, AttributeError):
        return 0


def _embedded_layers(name: str) -> int | None:
    """Decoder layers of an embedded model; None where it is another one."""
    try:
        config = json.loads((embedded_path(name) / "config.json").read_text(encoding="utf-8"))
    except ModelError:
        return None
    return int(config["text_config"]["num_hidden_layers"])
