"""The planner of one model: it weighs candidates against a target and explains its choice.

planner = Planner(model)
plan = planner.plan(inputs, make_target(target_ttft_ms=300))
with attach(model, plan.spec): ...

All targets share one ladder of candidates. It starts at the best quality and the most tokens, and
each step down is the best of the candidates that are faster and keep no more tokens, or that keep
fewer where time does not matter. A target only decides where to stop, so a tighter one never gets
more tokens than a looser one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmfast.core.errors import MmfastError, ModelError, warn
from mmfast.core.sizes import format_bytes
from mmfast.core.spec import Spec
from mmfast.models.decoder.draft_stage import DraftSource
from mmfast.models.loading import embedded_path
from mmfast.models.reduction.check import check as check_stages
from mmfast.models.reduction.check import placed
from mmfast.models.wrappers import stock_model
from mmfast.planner.caches import (
    CacheEvidence,
    cache_candidates,
    cache_evidence,
    cache_reason,
    most_accurate,
)
from mmfast.planner.calibration import Tick
from mmfast.planner.candidates import (
    DOCUMENT_SHARE,
    Candidate,
    Evidence,
    Rejected,
    Row,
    candidates,
    evidence_for,
    passed_over,
)
from mmfast.planner.cost import Cost, ModelShape, Work, draft_shape, work_of
from mmfast.planner.learner import Learner, Run
from mmfast.planner.plan import Plan
from mmfast.planner.rates import Rates
from mmfast.planner.target import FAST_SHARE, QUALITIES, Target

_STRANGER = (
    "There are no accuracy rows of this model, so those of a small one that comes along had to do; "
    "run `mmfast eval` with your own questions before you rely on them."
)
FASTER = 0.98  # a gain below 2 % drowns in what the prediction is off by


def ladder(candidates: Sequence[Candidate], timed: bool = True) -> list[Candidate]:
    """The candidates that are worth their cost, best first."""
    steps: list[Candidate] = []
    left = list(candidates)
    while left:
        best = max(left, key=_worth)
        steps.append(best)
        left = [c for c in left if _below(c.cost, best.cost, timed)]
    return steps


def _below(cost: Cost, best: Cost, timed: bool) -> bool:
    if timed:
        return cost.ttft < min(FASTER, 1 - best.noise) * best.ttft and cost.mean <= best.mean + 1e-9
    return cost.mean < best.mean - 1e-9


def _worth(candidate: Candidate) -> tuple[float, float, float, str]:
    """Quality, then tokens (detail such as text goes first), then speed, then the name."""
    cost = candidate.cost
    return candidate.accuracy or 0.0, cost.mean, -cost.ttft, candidate.spec or "~"


def good_enough(candidates: Sequence[Candidate], quality: str | None) -> list[Candidate]:
    """The candidates that a quality allows."""
    if quality is None:
        return list(candidates)
    full = next(c for c in candidates if not c.stages)
    points = QUALITIES[quality]
    if points is None:
        return [c for c in candidates if c.cost.mean <= FAST_SHARE * full.cost.mean + 0.5]
    floor = (full.accuracy or 0.0) - points - 1e-9
    return [c for c in candidates if (c.accuracy or 0.0) >= floor]


def meets(candidate: Candidate, target: Target, spent: float = 0.0) -> bool:
    """Tell whether a candidate stays within every limit; `spent` ms are gone already."""
    cost = candidate.cost
    return (
        (target.ttft_ms is None or spent + cost.ttft <= target.ttft_ms)
        and (target.tokens is None or cost.mean <= target.tokens)
        and (target.memory is None or cost.memory <= target.memory)
    )


def choose(
    candidates: Sequence[Candidate], target: Target, spent: float = 0.0
) -> tuple[Candidate | None, list[Candidate]]:
    """The first step of the ladder that meets the target, None if none does; and the ladder."""
    limited = target.tokens is not None or target.memory is not None
    timed = target.ttft_ms is not None or (target.quality is not None and not limited)
    steps = ladder(good_enough(candidates, target.quality), timed)
    fitting = [step for step in steps if meets(step, target, spent)]
    if not fitting:
        return None, steps
    floor_only = QUALITIES.get(target.quality or "") is not None
    return fitting[-1 if floor_only and timed and target.ttft_ms is None else 0], steps


def rungs_above(
    choice: Candidate,
    steps: Sequence[Candidate],
    stock: Candidate,
    target: Target,
    spent: float = 0.0,
) -> list[Candidate]:
    """Return the choice and what to go on to while it loses too much, up to all tokens.

    Each rung has at least twice the tokens of the one below, or is the last within the limits.
    """
    rungs = [choice]
    more = [step for step in [*reversed(steps), stock] if step.cost.mean > choice.cost.mean]
    more = [step for step in more if meets(step, target, spent)]
    for step in more:
        if step is more[-1] or step.cost.mean >= 2 * rungs[-1].cost.mean:
            rungs.append(step)
    return rungs


def surer(
    policies: Sequence[Candidate], choice: Candidate | None, target: Target
) -> Candidate | None:
    """The KV policy that meets a target with more accuracy than the choice among reducers."""
    held = most_accurate([each for each in policies if meets(each, target)])
    if held is None or (choice is not None and (held.accuracy or 0) <= (choice.accuracy or 0)):
        return None
    return held


def reasons(
    choice: Candidate,
    steps: Sequence[Candidate],
    found: Sequence[Candidate],
    target: Target,
    evidence: Evidence,
    work: Work,
    spent: float,
) -> tuple[str, ...]:
    """Explain a choice: its gain, the cost of the next better step, the evidence in the rows."""
    stock, cost = found[0].cost, choice.cost
    limited = any(v is not None for v in (target.ttft_ms, target.tokens, target.memory))
    lines = []
    if choice.spec is None:
        met = meets(choice, target, spent)
        lines.append(f"All visual tokens are kept{': that meets the target' if met else ''}.")
    else:
        gain = stock.ttft / cost.ttft
        lines.append(
            f"{choice.spec} leaves {cost.kept} of {work.visual} visual tokens and is predicted to "
            f"be {gain:.1f}x as fast to the first token as keeping all of them."
        )
        lines.append(_quality(choice, evidence))
    place = next((i for i, s in enumerate(steps) if s is choice), 0)
    if place:
        better = steps[place - 1]
        lines.append(
            f"The next better step, {better.spec or 'all tokens'}, would take "
            f"{spent + better.cost.ttft:.0f} ms with {better.cost.mean:.0f} tokens per layer"
            + (f", outside the target ({target})." if limited else ".")
        )
    if choice.spec is not None and not evidence.own:
        lines.append(_STRANGER)
    return tuple(lines)


def _quality(choice: Candidate, evidence: Evidence) -> str:
    if choice.accuracy is None:
        return "Nothing is known about its accuracy."
    return (
        f"It answers at least {choice.accuracy:.1%} right where all tokens answer "
        f"{evidence.full:.1%}, and more than random selection at this budget "
        f"({evidence.source})."
    )


def refusal(steps: Sequence[Candidate], target: Target, spent: float) -> str:
    """Explain that a target is out of reach, and name the best within reach."""
    if not steps:
        return f"no method is good enough for {target}; ask for another quality"
    best = steps[-1]
    name = best.spec or (f"cache {best.cache}" if best.cache else "all tokens")
    reach = []
    if target.ttft_ms is not None:
        reach.append(f"{spent + best.cost.ttft:.0f} ms to the first token")
    if target.tokens is not None:
        reach.append(f"{best.cost.mean:.0f} tokens per layer")
    if target.memory is not None:
        reach.append(format_bytes(best.cost.memory))
    return (
        f"{target} is out of reach here: the best is {', '.join(reach)} with {name}; "
        "raise the target, or give fewer frames or a smaller image"
    )


class PlanWarning(UserWarning):
    """A latency target is out of reach; the fastest plan runs."""


class Planner:
    """Plans for one model of a known family, by `name` in the accuracy `rows`, on its device."""

    def __init__(
        self,
        model: Any,
        name: str | None = None,
        rows: Sequence[Row] | None = None,
        rates: Rates | None = None,
        shape: ModelShape | None = None,
        remember: bool = True,
        drafts: DraftSource | None = None,
    ) -> None:
        model = stock_model(model)
        self.model, self.name, self.rows = model, name, rows
        draft = draft_shape(drafts, model)
        self.learner = Learner(model, rates, shape, remember, draft=draft)
        self._known: dict[str, Evidence] = {}
        self._caches: dict[str, CacheEvidence | None] = {}
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
        answer: int = 0,
        caches: bool = True,
        raised: int = 0,
        beams: int = 1,
    ) -> Plan:
        """Choose for one request, what the processor returned; without limits the stock model.

        `run` runs one call (`generate` or `forward`) for real, so that the overhead of short ones
        can be learnt; `spent` ms are gone since the caller started to wait; `kind` is that of the
        media, unless the target names one; `answer` is the longest answer in tokens, and `beams`
        the copies of a row that write it. Where memory is limited and time is not, a KV policy is
        taken if it is surer than all reducers within the limit, unless `caches` says that the call
        has one already or cannot have one. Where answers are checked, `raised` are the rungs to go
        up from the choice. A target out of reach is an MmfastError that says what the best plan
        reaches; unless `strict`, a latency out of reach is a warning, and the fastest runs.
        """
        work, media = work_of(self.model, inputs), target.kind or kind
        work = replace(work, answer=answer, beams=beams)
        with self.learner.aside():
            busy = self.learner.settle(work, call, run, tick)
            if busy:
                warn(busy, PlanWarning)
            if busy and target.may_wait:
                return _unmeasured(busy, work, spent)
            self.learner.learn(inputs, work, call, run, tick)
            if self._planning_ms is None:
                # The first time imports every method and measures what choosing takes.
                self._weigh(work, target, call, spent, media)
                start = time.perf_counter()
                self._weigh(work, target, call, spent, media)
                self._planning_ms = (time.perf_counter() - start) * 1e3
        given = work, target, call, spent, strict, media, self._planning_ms
        return self.decide(*given, caches, raised)

    def decide(
        self,
        work: Work,
        target: Target,
        call: str = "generate",
        spent: float = 0.0,
        strict: bool = True,
        kind: str = "video",
        planning: float = 0.0,
        caches: bool = True,
        raised: int = 0,
    ) -> Plan:
        """Choose with the rates as they are."""
        gone, kind = spent + planning, target.kind or kind
        choice, steps, found, rejected = self._weigh(work, target, call, gone, kind)
        policies = self._policies(found[0], work, target, call, kind) if caches else []
        held, times = surer(policies, choice, target), {"read": spent, "plan": planning}
        if held is not None:
            return self._cached(held, choice, found[0], rejected, work, kind, times)
        met = choice is not None
        if choice is None:
            every = [*steps[-1:], *(policies if target.tokens is None else ())]
            least = sorted(every, key=lambda each: each.cost.memory)[:1]
            choice = _best_effort([*steps, *least] if policies else steps, target, gone, strict)
        rungs = rungs_above(choice, steps, found[0], target, gone) if target.check else [choice]
        choice = rungs[min(raised, len(rungs) - 1)]
        evidence, depth = self._evidence(kind), self.learner.bench.shape.depth
        rejected += passed_over(choice, evidence, depth, rejected)
        why = reasons(choice, steps, found, target, evidence, work, gone)
        if not met:
            why = (f"The {refusal(steps, target, gone)}.", *why)
        if choice is not rungs[0]:
            why = (f"Checked answers raised it from {rungs[0].spec}.", *why)
        plan = _plan(choice, found[0], work, times, why, rejected, met)
        return replace(plan, rungs=tuple(rung.spec for rung in rungs), raised=raised)

    def _policies(
        self, stock: Candidate, work: Work, target: Target, call: str, kind: str
    ) -> list[Candidate]:
        """KV policies that are good enough, where they are weighed at all."""
        known, learner = self._cache_evidence(kind), self.learner
        if target.memory is None or target.ttft_ms is not None or known is None:
            return []
        priced = cache_candidates(
            known,
            stock.accuracy or 0.0,
            self.model,
            lambda cache: learner.cost(work, (), call, cache),
            DOCUMENT_SHARE if kind == "document" != known.chosen.kind else 0.0,
        )
        return [c for c in good_enough([stock, *priced], target.quality) if c.cache is not None]

    def _cached(
        self,
        held: Candidate,
        rival: Candidate | None,
        stock: Candidate,
        rejected: Sequence[Rejected],
        work: Work,
        kind: str,
        times: Mapping[str, float],
    ) -> Plan:
        known = self._cache_evidence(kind)
        assert known is not None
        why = [cache_reason(held, stock.cost, rival, known.chosen.source)]
        why += [] if known.chosen.own else [_STRANGER]
        return _plan(held, stock, work, times, tuple(why), rejected, True)

    def _cache_evidence(self, kind: str) -> CacheEvidence | None:
        if kind not in self._caches:
            self._caches[kind] = cache_evidence(kind, self.rows, self.name)
        return self._caches[kind]

    def _weigh(
        self, work: Work, target: Target, call: str, gone: float, kind: str
    ) -> tuple[Candidate | None, list[Candidate], list[Candidate], list[Rejected]]:
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
                check_stages(stages, self.model)

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
            found = found or Evidence(1.0, (), "no accuracy rows", kind)
            curves = tuple(replace(c, stages=self._placed(c.stages)) for c in found.curves)
            self._known[kind] = replace(found, curves=curves)
        return self._known[kind]

    def _placed(self, stages: tuple[Spec, ...]) -> tuple[Spec, ...]:
        try:
            return tuple(placed(stage, self.model) for stage in stages)
        except ModelError:  # it is compared with, and refused with a reason
            return stages


def _plan(
    choice: Candidate,
    stock: Candidate,
    work: Work,
    times: Mapping[str, float],
    why: tuple[str, ...],
    rejected: Sequence[Rejected],
    met: bool,
) -> Plan:
    cost, parts = choice.cost, ("encode", "select", "prefill", "overhead")
    return Plan(
        spec=choice.spec,
        ttft_ms={**times} | {p: getattr(cost, p) for p in parts},
        visual_tokens=work.visual,
        kept_tokens=cost.kept,
        mean_tokens=cost.mean,
        memory={name: getattr(cost, name) for name in ("weights", "kv", "activations")},
        accuracy=(choice.accuracy, stock.accuracy),
        met=met,
        why=why,
        rejected=tuple(rejected),
        cache=None if choice.cache is None else str(choice.cache),
    )


def _best_effort(
    steps: Sequence[Candidate], target: Target, spent: float, strict: bool
) -> Candidate:
    """The fastest step that meets every limit but the latency; an error if `strict` or none."""
    message = refusal(steps, target, spent)
    late = target.ttft_ms is not None and bool(steps)
    choice = choose(steps, replace(target, ttft_ms=None))[0] if late else None
    if strict or choice is None:
        raise MmfastError(message)
    warn(f"{message}; running the fastest plan", PlanWarning)
    return min((s for s in steps if s.cost.mean <= choice.cost.mean), key=lambda s: s.cost.ttft)


def _unmeasured(busy: str, work: Work, spent: float) -> Plan:
    """The plan without times to go by: what the stock model does."""
    n = work.visual
    note = "busy machine, not measured: all tokens"
    return Plan(None, {"read": spent}, n, n, n, {}, met=False, why=(f"{busy}.",), note=note)


def _embedded_layers(name: str) -> int | None:
    try:
        config = json.loads((embedded_path(name) / "config.json").read_text(encoding="utf-8"))
    except ModelError:
        return None
    return int(config["text_config"]["num_hidden_layers"])
