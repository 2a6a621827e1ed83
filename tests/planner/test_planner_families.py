"""Every family can be measured and planned for, on every kind of media it takes."""

from __future__ import annotations

import pytest
from tiny_models import ALL_FAMILIES, facts, tiny

from mmfast.attach import attach
from mmfast.models.families.adapter import token_counts
from mmfast.planner.planner import Planner
from mmfast.planner.target import make_target

CASES = [(family, kind) for family in ALL_FAMILIES for kind in facts(family).kinds]


def rows() -> list[dict[str, object]]:
    same = {"model": "m", "n": 1000}
    found: list[dict[str, object]] = [{"reduce": None, "score": 0.9, "kept": 100, **same}]
    for method, step in (("random", 0.3), ("divprune", 0.1)):
        found += [
            {"reduce": f"{method}:{share}", "score": 0.9 - step * (1 - share), **same}
            for share in (0.5, 0.25)
        ]
    return found


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_plan_keeps_what_it_says(family: str, kind: str) -> None:
    this = tiny(family)
    inputs = this.inputs([f"on {{{kind}}} what?"], **this.media(kind, 1, 0))
    planner = Planner(this.model, name="m", rows=rows(), remember=False)
    full = planner.plan(inputs, make_target(target_ttft_ms=1e6))
    assert full.spec is None and full.visual_tokens == full.kept_tokens > 4
    plan = planner.plan(inputs, make_target(target_tokens=full.visual_tokens // 2))
    assert plan.spec is not None and plan.spec.startswith("divprune:")
    assert planner.learner.rates.encode and plan.ttft_ms["encode"] > 0
    with attach(this.model, plan.spec) as trace:
        this.model(**inputs)
    left = sum(after for _, after in token_counts(this.model, kind, inputs, trace))
    assert left == plan.kept_tokens


def test_a_tower_of_convolutions_gives_no_signals() -> None:
    this = tiny("fast_vlm")
    inputs = this.inputs(["on {image} what?"], **this.media("image", 1, 0))
    shown = [
        {"reduce": f"visionzip:{s}", "score": 0.9, "model": "m", "n": 1000} for s in (0.5, 0.25)
    ]
    planner = Planner(this.model, name="m", rows=rows() + shown, remember=False)
    plan = planner.plan(inputs, make_target(target_tokens=20))
    reasons = {r.spec: r.reason for r in plan.rejected}
    assert "no attention to read" in reasons["visionzip"]
