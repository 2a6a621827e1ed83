"""Specs worth considering for a request, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mmfast.core.errors import MmfastError
from mmfast.core.spec import Spec, count
from mmfast.planner.cost import Cost
from mmfast.planner.evidence import BASELINE, Curve, Evidence
from mmfast.planner.work import Work

# Shares that are tried: steps of 5 %, finer where few tokens are left.
SHARES = (
    *(round(0.95 - 0.05 * i, 2) for i in range(15)),
    *(round(0.18 - 0.02 * i, 2) for i in range(8)),
    *(0.03, 0.02, 0.01),
)
RIVALS = 3  # methods that are priced at one place and budget
DOCUMENT_SHARE = 0.5  # text is lost first: without rows on documents no less is kept of one


@dataclass(frozen=True)
class Candidate:
    """A spec with what is known of its quality and what it is predicted to cost.

    Attributes:
        stages: Parsed spec; none is the stock model.
        accuracy: What its evidence makes sure of, at most that of all tokens; None without rows.
        cost: The prediction.
    """

    stages: tuple[Spec, ...]
    accuracy: float | None
    cost: Cost

    @property
    def spec(self) -> str | None:
        """The spec string."""
        return "+".join(map(spell, self.stages)) or None


@dataclass(frozen=True)
class Rejected:
    """A spec that was looked at and not taken."""

    spec: str
    reason: str


def spell(stage: Spec) -> str:
    """A stage as a person writes it: the site only where it is not the method's own."""
    method = stage.method
    usual = stage.site == method.sites[0] and stage.layer in (None, method.layer)
    where = "" if usual else f"@{stage.where}"
    budget = "" if stage.budget is None else f":{stage.budget}"
    knobs = "&".join(f"{k}={v}" for k, v in stage.knobs.items())
    return f"{method.name}{where}{budget}" + (f"?{knobs}" if knobs else "")


def candidates(
    evidence: Evidence,
    work: Work,
    depth: int,
    price: Callable[[tuple[Spec, ...]], Cost],
    check: Callable[[tuple[Spec, ...]], object] = lambda stages: None,
    floor: float = 0.0,
) -> tuple[list[Candidate], list[Rejected]]:
    """Everything the evidence allows on this model.

    Args:
        evidence: Accuracy rows.
        work: The request.
        depth: Decoder layers of the model.
        price: Predicts the cost of a spec.
        check: Raises MmfastError for a spec that the model cannot run.
        floor: Smallest share to keep.

    Returns:
        Candidates, the stock model first, and a reason for each method that is out altogether.
    """
    best: dict[tuple[object, ...], list[tuple[float, tuple[Spec, ...]]]] = {}
    rejected: list[Rejected] = []
    for curve in evidence.curves:
        stages = _moved(curve, depth)
        if stages[0].method.name == BASELINE:
            continue
        reason = _unfit(stages, work, check)
        good, doubts = ([], []) if reason else evidence.allowed(curve, _shares(curve))
        good = [(share, score) for share, score in good if share >= floor]
        if not good:
            rejected.append(Rejected(_name(stages), reason or _why_none(doubts, floor)))
        for share, score in good:
            full = (replace(stages[0], budget=share),) if curve.single else stages
            place = tuple((s.where, _tokens(s, work)) for s in full)
            best.setdefault(place, []).append((min(score, evidence.full), full))
    found = [Candidate((), evidence.full, price(()))]
    for rivals in best.values():
        # The same tokens in the same layers cost the same but for choosing: the best few will do.
        rivals.sort(key=lambda rival: -rival[0])
        found += [Candidate(full, score, price(full)) for score, full in rivals[:RIVALS]]
    return found, rejected


def passed_over(
    choice: Candidate, evidence: Evidence, depth: int, known: Iterable[Rejected]
) -> list[Rejected]:
    """Why each other method was not taken at the budget of the choice."""
    if len(choice.stages) != 1 or not isinstance(choice.stages[0].budget, float):
        return []
    share, found = choice.stages[0].budget, []
    out = {each.spec for each in known} | {_name(choice.stages)}
    for curve in evidence.curves:
        stages = _moved(curve, depth)
        if not curve.single or curve in evidence.baselines or _name(stages) in out:
            continue
        reason, sure = evidence.verdict(curve, share), evidence.accuracy(curve, share)
        if reason is None and sure is not None:
            less = choice.accuracy is not None and min(sure, evidence.full) < choice.accuracy
            reason = f"sure of {sure:.1%} only" if less else "as sure, but not worth its time"
        name = spell(replace(stages[0], budget=share))
        found.append(Rejected(name, reason or "nothing measured"))
    return found


def _name(stages: Sequence[Spec]) -> str:
    """A spec as it is called across budgets."""
    single = len(stages) == 1
    return "+".join(spell(replace(s, budget=None) if single else s) for s in stages)


def _tokens(stage: Spec, work: Work) -> object:
    """What a budget comes to on the largest item: shares that come to the same are one."""
    budget = stage.budget
    return count(budget, max(work.items)) if isinstance(budget, float) else budget


def _shares(curve: Curve) -> Iterable[float]:
    measured = [share for share, _ in curve.points]
    return sorted({*SHARES, *measured}, reverse=True) if curve.single else measured


def _moved(curve: Curve, depth: int) -> tuple[Spec, ...]:
    """The stages at the same relative depth of this model, rounded to the later layer."""
    moved = []
    for stage in curve.stages:
        if stage.layer is not None and curve.layers and curve.layers != depth:
            layer = min(depth - 1, -(-stage.layer * depth // curve.layers))
            stage = replace(stage, layer=max(1, layer))
        moved.append(stage)
    return tuple(moved)


def _unfit(
    stages: Sequence[Spec], work: Work, check: Callable[[tuple[Spec, ...]], object]
) -> str | None:
    """Why this model or request cannot have the spec at all."""
    for stage in stages:
        if stage.site not in ("pre", "llm"):
            return f"the cost of site {stage.where!r} is not modelled"
        for need in stage.method.needs:
            reason = work.lacks(stage.site, need)
            if reason is not None:
                return f"needs {need!r}: {reason}"
    try:
        check(tuple(replace(s, budget=0.5) for s in stages))
    except MmfastError as error:
        return str(error)
    return None


def _why_none(doubts: Sequence[str], floor: float) -> str:
    measured = [text for text in doubts if "measured budget" not in text]
    return measured[-1] if measured else f"nothing measured at or above a share of {floor:.3g}"
