"""Specs worth considering for a request, and why the others are not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    found = [Candidate((), evidence.full, price(()))]
    rejected: dict[str, Rejected] = {}
    for curve in evidence.curves:
        stages = _moved(curve, depth)
        name = "+".join(spell(replace(s, budget=None) if curve.single else s) for s in stages)
        if stages[0].method.name == BASELINE:
            continue
        reason = _unfit(stages, work, check)
        if reason is not None:
            rejected[name] = Rejected(name, reason)
            continue
        verdicts: dict[float, str] = {}
        before = len(found)
        for share in _shares(curve):
            verdict = evidence.verdict(curve, share)
            if verdict is not None:
                verdicts[share] = verdict
            elif share >= floor:
                full = _with_budget(curve, stages, share)
                accuracy = evidence.accuracy(curve, share)
                assert accuracy is not None
                found.append(Candidate(full, min(accuracy, evidence.full), price(full)))
        if len(found) == before:
            rejected[name] = Rejected(name, _why_none(verdicts, floor))
    return _distinct(found, work), list(rejected.values())


def _shares(curve: Curve) -> Iterable[float]:
    measured = [share for share, _ in curve.points]
    return sorted({*SHARES, *measured}, reverse=True) if curve.single else measured


def _with_budget(curve: Curve, stages: tuple[Spec, ...], share: float) -> tuple[Spec, ...]:
    return (replace(stages[0], budget=share),) if curve.single else stages


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


def _why_none(verdicts: Mapping[float, str], floor: float) -> str:
    measured = [text for text in verdicts.values() if "measured budget" not in text]
    if measured:
        return measured[-1]
    return f"nothing measured at or above a share of {floor:.3g}"


def _distinct(found: Sequence[Candidate], work: Work) -> list[Candidate]:
    """Shares that come to the same number of tokens are one candidate."""
    seen, kept = set(), []
    for each in found:
        budgets = tuple(
            count(s.budget, max(work.items)) if isinstance(s.budget, float) else s.budget
            for s in each.stages
        )
        key = (*(str(replace(s, budget=None)) for s in each.stages), *budgets)
        if key not in seen:
            seen.add(key)
            kept.append(each)
    return kept
