"""Specs of what later requests reuse: `encoder`, `prefix`, `blend:0.15`, `craft:0.15`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmfast.core.errors import SpecError, unknown
from mmfast.core.spec import Spec, parse
from mmfast.models.reduction.decoder_signals import AHEAD

SHARE = 0.15
MODES = {
    "encoder": "outputs of the vision tower",
    "prefix": "these, and keys and values of a prompt's beginning, bit for bit",
    "blend": "these, and those of media seen elsewhere; tokens whose keys and values deviate most "
    "in the first layers are recomputed (CacheBlend, 2405.16444)",
    "craft": "the same; tokens that once looked most at what stood before them are recomputed "
    "(Cache-Craft, 2502.15734)",
}


@dataclass(frozen=True)
class ReusePlan:
    """One mode, and the share of tokens of media seen elsewhere that every layer recomputes."""

    mode: str
    share: float = SHARE

    @property
    def prefix(self) -> bool:
        """Keys and values are reused, not encoder outputs alone."""
        return self.mode != "encoder"

    @property
    def anywhere(self) -> bool:
        """Media are reused behind another beginning, too."""
        return self.mode in ("blend", "craft")

    def __str__(self) -> str:
        return f"{self.mode}:{self.share:g}" if self.anywhere else self.mode


def parse_reuse(spec: Any) -> ReusePlan | None:
    """Read a spec; None or "" reuse nothing. SpecError: says what is wrong and the choices."""
    if spec is None or spec == "" or isinstance(spec, ReusePlan):
        return spec or None
    if not isinstance(spec, str):
        raise SpecError(f"reuse={spec!r} is no spec; choices: {', '.join(MODES)}")
    name, colon, given = spec.strip().partition(":")
    if name not in MODES:
        raise SpecError(unknown("reuse", name, MODES))
    plan = ReusePlan(name)
    if not colon:
        return plan
    if not plan.anywhere:
        raise SpecError(f"reuse={spec!r}: {name} recomputes nothing; write {name!r}")
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SpecError(f"reuse={spec!r}: {given!r} is no share from 0 to 1; write {name}:{SHARE}")
    return ReusePlan(name, share)


def check_beside(
    plan: ReusePlan | None,
    reduce: str | Sequence[Spec] | None,
    cache: Any = None,
    decode: Any = None,
    prefill: Any = None,
) -> None:
    """Refuse (SpecError) what gives every layer other tokens beside reused keys and values."""
    if plan is None or not plan.prefix:
        return
    early = ("pixel", "vit", "pre")
    inside = [s for s in parse(reduce) if s.site not in early or AHEAD in s.method.needs]
    if inside:
        raise SpecError(
            f"reuse={str(plan)!r} does not act beside {str(inside[0])!r}, which acts "
            "between layers; use reuse='encoder', or a stage at pre"
        )
    if cache is not None:
        raise SpecError(
            f"reuse={str(plan)!r} does not act beside a cache policy, which gives every layer "
            "other entries; use reuse='encoder', or leave cache out"
        )
    if decode is not None:
        raise SpecError(
            f"reuse={str(plan)!r} does not act beside decode={str(decode)!r}, which drafts from a "
            "prompt that it reads whole; use reuse='encoder', or leave decode out"
        )
    if prefill is not None:
        raise SpecError(
            f"reuse={str(plan)!r} does not act beside prefill={str(prefill)!r}, under which keys "
            "depend on the whole prompt; use reuse='encoder', or leave prefill out"
        )
