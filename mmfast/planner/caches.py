"""KV policies as candidates where memory is limited, with the evidence for their accuracy.

A policy that keeps a share has to beat random eviction by more than chance, as reducers have to; a
store in fewer bits chooses nothing, and what it answered stands as measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mmfast.caches.plan import CachePlan, plan_cache
from mmfast.core.errors import MmfastError
from mmfast.core.sizes import format_bytes
from mmfast.core.trace import Trace
from mmfast.models.kv.policy import KVStage
from mmfast.models.reduction.call import PassState
from mmfast.planner.candidates import (
    BASELINE,
    SHARES,
    SUBSET,
    Candidate,
    Curve,
    Evidence,
    Row,
    questions,
    scored,
    shipped_rows,
    subset,
)
from mmfast.planner.cost import Cost

# Sums of all attention need scores of a whole prompt at once, repeated ones a second reading of it,
# and the others a calibration.
_COSTLY = {"attn_sum", "attn_repeated", "query_filter", "query_reach", "key_gate"}


@dataclass(frozen=True)
class CacheEvidence:
    """Rows of KV policies on one kind of media."""

    chosen: Evidence  # policies that keep a share, a curve each
    packs: tuple[tuple[str, float], ...]  # specs of stores in fewer bits, and their accuracy

    def sure(self, score: float, full: float) -> float:
        """Return what is sure of a policy whose rows may be of other questions than `full` is."""
        return min(full, full - (self.chosen.full - score))


def cache_evidence(
    kind: str, rows: Sequence[Row] | None = None, model: str | None = None
) -> CacheEvidence | None:
    """Collect the rows of KV policies about media of a kind; None where none were measured.

    As for reducers, clips and the embedded models stand in for what was not measured.
    """
    every = shipped_rows() if rows is None else rows
    usable = [r for r in every if scored(r) and r["reduce"] is None]
    for wanted in (kind, SUBSET):
        kept = [r for r in usable if r.get("cache") and subset(r) == wanted]
        kept = [r for r in kept if r.get("model") == model] or kept
        found = [r for r in usable if kept and questions(r) == questions(kept[-1])]
        found = [r for r in found if subset(r) == wanted]
        whole = [r for r in found if not r.get("cache")]
        if not whole:
            continue
        name, n = str(whole[-1].get("model")), int(whole[-1].get("n") or 1)
        curves, packs = _read([r for r in found if r.get("cache")])
        source = f"{n} questions to {name} about {wanted} input"
        full = float(whole[-1]["score"])
        return CacheEvidence(Evidence(full, curves, source, wanted, name == model, n), packs)
    return None


def _read(rows: Sequence[Row]) -> tuple[tuple[Curve, ...], tuple[tuple[str, float], ...]]:
    points: dict[str, tuple[Any, dict[float, float]]] = {}
    packs: dict[str, float] = {}
    for row in rows:
        try:
            plan = plan_cache(str(row["cache"]))
        except MmfastError:
            continue  # a policy that has left the package
        if plan is None or len(plan.parts) != 1 or plan.pruner() is not None:
            continue  # what leaves out channels is not priced
        (spec,), score = plan.parts, float(row["score"])
        if plan.store is not None:
            packs[str(plan)] = score
        elif plan.score is not None and isinstance(spec.budget, float) and _plain(plan):
            key = str(plan).replace(f":{spec.budget}", "", 1)
            points.setdefault(key, (spec, {}))[1][spec.budget] = score
    curves = (Curve((spec,), tuple(sorted(found.items()))) for spec, found in points.values())
    return tuple(curves), tuple(packs.items())


def _plain(plan: CachePlan) -> bool:
    """Return True if its budget says what every layer holds, and it can choose at little cost."""
    method = plan.parts[0].method
    uneven = method.uneven or method.adaptive or plan.bits is not None
    return method.moment == "prefill" and not uneven and not _COSTLY & set(method.needs)


def cache_candidates(
    known: CacheEvidence,
    full: float,
    model: Any,
    price: Callable[[CachePlan], Cost],
    floor: float = 0.0,
) -> list[Candidate]:
    """List the policies that the evidence allows on a model that answers `full` with all.

    No smaller a share is kept than `floor`.
    """
    specs = list(known.packs)
    for curve in known.chosen.curves:
        if curve.name != BASELINE:
            shares = sorted({*SHARES, *(share for share, _ in curve.points)})
            spec = str(curve.stages[0]).replace("@kv", "", 1)
            name, mark, knobs = spec.partition("?")
            name = name.partition(":")[0]
            good, _ = known.chosen.allowed(curve, shares)
            specs += [
                (f"{name}:{share}{mark}{knobs}", score) for share, score in good if share >= floor
            ]
    found, fits = [], dict[str, bool]()
    for text, score in specs:
        plan = plan_cache(text)
        assert plan is not None
        name = plan.parts[0].method.name
        if name not in fits:
            fits[name] = _fits(model, plan)
        if fits[name]:
            found.append(Candidate((), known.sure(score, full), price(plan), plan))
    return found


def _fits(model: Any, plan: CachePlan) -> bool:
    try:
        KVStage(model, plan, Trace(), PassState())
    except MmfastError:
        return False
    return True


def most_accurate(candidates: Sequence[Candidate]) -> Candidate | None:
    """The most accurate; of equal ones that which holds most, then the one that reads least."""
    return max(candidates, key=_rank, default=None)


def _rank(candidate: Candidate) -> tuple[float, int, int, str]:
    cache = candidate.cache
    needs = 0 if cache is None else len(cache.needs)
    return candidate.accuracy or 0.0, candidate.cost.memory, -needs, str(cache)


def cache_reason(choice: Candidate, stock: Cost, rival: Candidate | None, source: str) -> str:
    """Explain in one line why a policy is taken and no reducer."""
    cost = choice.cost
    other = "no reduction meets the limit"
    if rival is not None and rival.accuracy is not None:
        other = f"the best reduction within it, {rival.spec}, is sure of {rival.accuracy:.1%}"
    return (
        f"cache {choice.cache} holds {format_bytes(cost.kv)} of keys and values instead of "
        f"{format_bytes(stock.kv)} and is sure of {choice.accuracy or 0.0:.1%}, where {other} "
        f"({source})."
    )
