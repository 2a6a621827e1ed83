"""The choice in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from mmfast.planner.candidates import Candidate
from mmfast.planner.evidence import Evidence
from mmfast.planner.target import Target, size
from mmfast.planner.work import Work


def reasons(
    choice: Candidate,
    steps: Sequence[Candidate],
    found: Sequence[Candidate],
    target: Target,
    evidence: Evidence,
    work: Work,
    spent: float,
) -> tuple[str, ...]:
    """Why this candidate: what it gains, what the next better one costs, what the rows say."""
    stock, cost = found[0].cost, choice.cost
    limited = any(v is not None for v in (target.ttft_ms, target.tokens, target.memory))
    lines = []
    if choice.spec is None:
        lines.append("All visual tokens are kept: that meets the target.")
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
        lines.append(
            "There are no accuracy rows of this model, so those of the embedded one had to do; "
            "run `mmfast eval` with your own questions before you rely on them."
        )
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
    """What cannot be met, and the best that can."""
    if not steps:
        return f"no method is good enough for {target}; ask for another quality"
    best = steps[-1]
    name = best.spec or "all tokens"
    reach = []
    if target.ttft_ms is not None:
        reach.append(f"{spent + best.cost.ttft:.0f} ms to the first token")
    if target.tokens is not None:
        reach.append(f"{best.cost.mean:.0f} tokens per layer")
    if target.memory is not None:
        reach.append(size(best.cost.memory))
    return (
        f"{target} is out of reach here: the best is {', '.join(reach)} with {name}; "
        "raise the target, or give fewer frames or a smaller image"
    )
