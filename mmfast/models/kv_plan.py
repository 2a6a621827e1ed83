"""Cache specs of a call, as against those of a stream."""

from __future__ import annotations

from mmfast.caches.plan import CachePlan, plan_cache
from mmfast.core.errors import SpecError


def call_plan(text: str | None) -> CachePlan | None:
    """Read the cache spec of `attach`; None or "" is no policy at all.

    Raises:
        SpecError: A name, knob or budget is wrong, or policies do not go together.
    """
    plan = plan_cache(text)
    if plan is not None and plan.retrieve is not None and plan.score is not None:
        names = plan.score.method.name, plan.retrieve.method.name
        raise SpecError(
            f"{names[0]!r} evicts what {names[1]!r} would find again; drop one of them, or keep by "
            "place, such as 'sink:4+window:256+retrieve:8'"
        )
    return plan
