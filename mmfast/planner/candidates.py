"""Candidate specs for a request, with evidence for their accuracy and reasons against others.

The evidence is accuracy rows in the package. Between two measured budgets the worse of both counts;
below the smallest there is no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from statistics import NormalDist
from typing import Any

from mmfast.caches.plan import CachePlan
from mmfast.core.errors import MmfastError, SpecError
from mmfast.core.files import json_lines
from mmfast.core.spec import Spec, count, parse
from mmfast.ops.weight_forms import FORMS
from mmfast.planner.cost import Cost, Work

Row = Mapping[str, Any]
BASELINE = "random"
# What a method has to beat by more than chance; `downsample` is a choice of its own besides.
RIVALS = (BASELINE, "uniform", "downsample")
CHANCE = 0.05  # that a method which is no better than its rivals is preferred to them
_SAME = ("model", "n", "seed")  # other questions are no comparison
Point = tuple[float, float]  # (share kept, accuracy)
SUBSET = "video"  # of rows that name no kind of media


@dataclass(frozen=True)
class Curve:
    """Accuracy of one spec over its budgets."""

    stages: tuple[Spec, ...]  # as measured; only a single stage may take another budget
    points: tuple[Point, ...]  # `(share kept, accuracy)` ascending
    layers: int | None = None  # decoder layers of the model it was measured on

    @property
    def single(self) -> bool:
        """The budget may be changed."""
        return len(self.stages) == 1

    @property
    def name(self) -> str:
        """Name of its first method."""
        return self.stages[0].method.name

    def around(self, share: float) -> list[Point]:
        """The measured points next to `share`; none where it is below the smallest."""
        for point in self.points:
            if abs(point[0] - share) < 1e-6:
                return [point]
        below = [p for p in self.points if p[0] < share]
        if not below or not self.single:
            return []
        return [below[-1], *[p for p in self.points if p[0] > share][:1]]


@dataclass(frozen=True)
class Evidence:
    """Rows of one kind of media."""

    full: float  # accuracy with all tokens
    curves: tuple[Curve, ...]  # one per spec without its budget
    source: str = ""  # where the rows come from, in words
    kind: str = SUBSET  # the kind of media the rows are about
    own: bool = True  # they are about the very model that is planned for
    n: int = 400  # questions behind each row

    @cached_property
    def baselines(self) -> tuple[Curve, ...]:
        """Methods that have to be beaten, at each site they were measured at."""
        return tuple(c for c in self.curves if c.single and c.name in RIVALS)

    def chance(self, score: float, rival: float) -> float:
        """The lead over a rival that chance explains, among all methods that were tried.

        Rows have no single answers, so the answers to the same questions count as independent,
        which makes the lead larger than it is between methods that fail at the same questions.
        """
        tried = max(1, len(self.curves) - len(self.baselines))
        spread = score * (1 - score) + rival * (1 - rival)
        return NormalDist().inv_cdf(1 - CHANCE / tried) * math.sqrt(spread / self.n)

    def allowed(self, curve: Curve, shares: Iterable[float]) -> tuple[list[Point], list[str]]:
        """(share, sure accuracy) wherever the spec may be recommended; else the reasons."""
        good, reasons = list[Point](), list[str]()
        for share in shares:
            reason = self.verdict(curve, share)
            if reason is not None:
                reasons.append(reason)
            elif (score := self.accuracy(curve, share)) is not None:
                good.append((share, score))
        return good, reasons

    @cached_property
    def sure(self) -> list[tuple[list[Point], list[str]]]:
        """Points and reasons of each curve (`allowed`) at all budgets tried, the largest first.

        It is weighed once: every request would pay for it in front of its first token.
        """
        tried = [[share for share, _ in curve.points] for curve in self.curves]
        return [
            self.allowed(curve, sorted({*SHARES, *own}, reverse=True) if curve.single else own)
            for curve, own in zip(self.curves, tried, strict=True)
        ]

    def accuracy(self, curve: Curve, share: float) -> float | None:
        """Accuracy that is sure at `share`: of the measured points around it, the worse one."""
        around = curve.around(share)
        return min(score for _, score in around) if around else None

    def verdict(self, curve: Curve, share: float) -> str | None:
        """Reason against a spec at `share`; None where it may be recommended."""
        around = curve.around(share)
        if not around:
            return f"no measured budget at or below {share:.3g}"
        for at, score in around:
            rivals = self.rivals(curve, at)
            if BASELINE not in rivals:
                return f"no random baseline measured to compare with at {at:.3g}"
            for name, rival in rivals.items():
                chance = 0.0 if curve.name in RIVALS else self.chance(score, rival)
                if score <= rival or score - rival < chance:
                    shown = "random selection" if name == BASELINE else name
                    lead = f" by more than chance ({chance:.1%})" if score > rival else ""
                    return f"{score:.1%} at {at:.3g} is not above {shown} ({rival:.1%}){lead}"
        return None

    def rivals(self, curve: Curve, share: float) -> dict[str, float]:
        """Best result of each rival at no smaller a budget, also at the same site.

        A rival itself has to be above random selection alone.
        """
        found: dict[str, float] = {}
        for rival in self.baselines if curve.name != BASELINE else ():
            score = next((s for at, s in rival.points if at >= share - 1e-6), None)
            wanted = rival.name == BASELINE or curve.name not in RIVALS
            if wanted and score is not None and _comparable(rival, curve):
                found[rival.name] = max(score, found.get(rival.name, 0.0))
        return found


def _comparable(rival: Curve, curve: Curve) -> bool:
    return rival.stages[0].site != "llm" or rival.stages[0].where == curve.stages[-1].where


@cache
def shipped_rows() -> tuple[Row, ...]:
    """The accuracy rows that come with the package, in the order of the file names."""
    folder = files("mmfast.assets").joinpath("results")
    names = sorted(f.name for f in folder.iterdir()) if folder.is_dir() else []
    rows: list[Row] = []
    for name in names:
        if name.startswith("eval") and name.endswith(".jsonl"):
            text = folder.joinpath(name).read_text(encoding="utf-8")
            rows += json_lines(text)
    return tuple(rows)


def evidence_for(
    kind: str,
    rows: Sequence[Row] | None = None,
    model: str | None = None,
    layers: Callable[[str], int | None] = lambda name: None,
) -> Evidence | None:
    """Collect the rows about media of a kind; None where all tokens were not measured.

    Rows of clips stand in where a kind has none, those of the embedded models where `model` has
    none. `layers` gives the decoder layers of a model by its name.
    """
    usable = [
        r for r in (shipped_rows() if rows is None else rows) if scored(r) and not r.get("cache")
    ]
    for wanted in (kind, SUBSET):
        of_kind = [r for r in usable if subset(r) == wanted]
        whole = [r for r in of_kind if r["reduce"] is None]
        if not whole:
            continue
        reduced = [questions(r) for r in of_kind if r["reduce"] is not None]
        whole = [r for r in whole if questions(r) in reduced] or whole  # else of KV policies
        own = [r for r in whole if r.get("model") == model]
        full = (own or whole)[-1]
        name, total = str(full.get("model")), float(full.get("kept") or 0)
        found = [r for r in of_kind if questions(r) == questions(full)]
        depth = layers(name)
        curves = tuple(replace(c, layers=depth) for c in _curves(found, total))
        source = f"{full.get('n', '?')} questions to {name} about {wanted} input"
        asked = int(full.get("n") or 1)
        return Evidence(float(full["score"]), curves, source, wanted, bool(own), asked)
    return None


def questions(row: Row) -> tuple[Any, ...]:
    """Return what tells the questions of a row from those of others."""
    return tuple(row.get(name) for name in _SAME)


def subset(row: Row) -> str:
    """Kind of media of a row, or the name of a suite that asks for something else."""
    return str(row.get("subset") or row.get("suite") or SUBSET)


def scored(row: Row) -> bool:
    """Return True for an accuracy of a reduction or a KV policy alone."""
    # What sparse prefill or weights in fewer bits cost says nothing about them. Rows of a
    # leaderboard name the weights of the checkpoint.
    plain = not row.get("prefill") and row.get("weights") not in FORMS
    return isinstance(row.get("score"), (int, float)) and "reduce" in row and plain


def _curves(rows: Iterable[Row], total: float) -> list[Curve]:
    found: dict[str, tuple[tuple[Spec, ...], dict[float, float]]] = {}
    for row in rows:
        try:
            stages = parse(row["reduce"])
        except SpecError:
            continue  # a method that has left the package
        share = _share(stages, float(row.get("kept") or 0), total)
        if not stages or share is None:
            continue
        free = tuple(replace(s, budget=None) for s in stages) if len(stages) == 1 else stages
        key = "+".join(map(str, free))
        found.setdefault(key, (stages, {}))[1][share] = float(row["score"])
    return [Curve(stages, tuple(sorted(points.items()))) for stages, points in found.values()]


def _share(stages: Sequence[Spec], kept: float, total: float) -> float | None:
    if len(stages) == 1 and isinstance(stages[0].budget, float):
        return stages[0].budget
    return kept / total if total and kept else None


# Shares that are tried: steps of 5 %, finer where few tokens are left.
SHARES = (
    *(round(0.95 - 0.05 * i, 2) for i in range(15)),
    *(round(0.18 - 0.02 * i, 2) for i in range(8)),
    *(0.03, 0.02, 0.01),
)
PRICED = 3  # methods that are priced at one place and budget
DOCUMENT_SHARE = 0.5  # text is lost first: without rows on documents no less is kept of one


@dataclass(frozen=True)
class Candidate:
    """A spec with what is known of its quality and what it is predicted to cost."""

    stages: tuple[Spec, ...]  # parsed spec; none is the stock model
    accuracy: float | None  # sure by its evidence, at most that of all tokens; None without rows
    cost: Cost  # the prediction
    cache: CachePlan | None = None  # KV policy in place of reducers

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
    """List every spec that the evidence allows on this model, and the others with a reason."""
    best: dict[tuple[object, ...], list[tuple[float, tuple[Spec, ...]]]] = {}
    rejected: list[Rejected] = []
    for curve, sure in zip(evidence.curves, evidence.sure, strict=True):
        stages = _moved(curve, depth)
        if stages[0].method.name == BASELINE:
            continue
        reason = _unfit(stages, work, check)
        good, doubts = ([], []) if reason else sure
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
        found += [Candidate(full, score, price(full)) for score, full in rivals[:PRICED]]
    return found, rejected


def passed_over(
    choice: Candidate, evidence: Evidence, depth: int, known: Iterable[Rejected]
) -> list[Rejected]:
    """Reasons against every other method at the budget of the choice."""
    if len(choice.stages) != 1 or not isinstance(choice.stages[0].budget, float):
        return []
    share, found = choice.stages[0].budget, []
    out = {each.spec for each in known} | {_name(choice.stages)}
    for curve in evidence.curves:
        stages = _moved(curve, depth)
        if not curve.single or curve.name == BASELINE or _name(stages) in out:
            continue
        reason, sure = evidence.verdict(curve, share), evidence.accuracy(curve, share)
        if reason is None and sure is not None:
            less = choice.accuracy is not None and min(sure, evidence.full) < choice.accuracy
            reason = f"sure of {sure:.1%} only" if less else "as sure, but not worth its time"
        name = spell(replace(stages[0], budget=share))
        found.append(Rejected(name, reason or "nothing measured"))
    return found


def _name(stages: Sequence[Spec]) -> str:
    single = len(stages) == 1
    return "+".join(spell(replace(s, budget=None) if single else s) for s in stages)


def _tokens(stage: Spec, work: Work) -> object:
    """Tokens that a budget leaves of the largest item: shares with equal results are one."""
    budget = stage.budget
    return count(budget, max(work.items)) if isinstance(budget, float) else budget


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
    for stage in stages:
        if stage.site not in ("pre", "llm") and not stage.method.resizes:
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
