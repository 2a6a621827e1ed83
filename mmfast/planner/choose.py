"""Which candidate: down one ladder that is the same for every target.

The ladder starts at the best quality and the most tokens. Each step down is the best of what is
faster and keeps no more tokens, or keeps fewer where time does not matter. A target only says
where to stop, so a tighter one never gets more tokens than a looser one.
"""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.planner.candidates import Candidate
from mmfast.planner.cost import Cost
from mmfast.planner.target import FAST_SHARE, QUALITIES, Target

FASTER = 0.98  # a gain below 2 % drowns in what the prediction is off by


def ladder(candidates: Sequence[Candidate], timed: bool = True) -> list[Candidate]:
    """The candidates that are worth their cost, best first.

    Args:
        candidates: What to choose from.
        timed: Every step must be faster than the one before; else it must keep fewer tokens.
    """
    steps: list[Candidate] = []
    left = list(candidates)
    while left:
        best = max(left, key=_worth)
        steps.append(best)
        left = [c for c in left if _below(c.cost, best.cost, timed)]
    return steps


def _below(cost: Cost, best: Cost, timed: bool) -> bool:
    if timed:
        return cost.ttft < FASTER * best.ttft and cost.mean <= best.mean + 1e-9
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
    """Whether a candidate stays within every limit; `spent` ms are gone already."""
    cost = candidate.cost
    return (
        (target.ttft_ms is None or spent + cost.ttft <= target.ttft_ms)
        and (target.tokens is None or cost.mean <= target.tokens)
        and (target.memory is None or cost.memory <= target.memory)
    )


def choose(
    candidates: Sequence[Candidate], target: Target, spent: float = 0.0
) -> tuple[Candidate | None, list[Candidate]]:
    """The first step of the ladder that meets the target.

    A quality alone is a limit from below, so the fastest step that it allows is taken; `fast`
    is the best of what keeps a tenth.

    Returns:
        The choice, or None where no step meets the target; and the ladder.
    """
    limited = target.tokens is not None or target.memory is not None
    timed = target.ttft_ms is not None or (target.quality is not None and not limited)
    steps = ladder(good_enough(candidates, target.quality), timed)
    fitting = [step for step in steps if meets(step, target, spent)]
    if not fitting:
        return None, steps
    floor_only = QUALITIES.get(target.quality or "") is not None
    return fitting[-1 if floor_only and timed and target.ttft_ms is None else 0], steps
