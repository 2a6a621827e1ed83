"""Specs of what later requests reuse: `encoder`, `prefix`, `blend:0.15`, `craft:0.15`, `kvcomm`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mmfast.core.errors import SpecError, unknown
from mmfast.core.spec import Spec, parse
from mmfast.models.reduction.decoder_signals import AHEAD
from mmfast.prefill.plan import plan_prefill

SHARE = 0.15
ENTROPY, ANCHORS, LEAST = 1.0, 20, 8  # of `kvcomm`
MODES = {
    "encoder": "outputs of the vision tower",
    "prefix": "these, and keys and values of a prompt's beginning, bit for bit",
    "blend": "these, and those of media seen elsewhere; tokens whose keys and values deviate most "
    "in the first layers are recomputed (CacheBlend, 2405.16444)",
    "craft": "the same; tokens that once looked most at what stood before them are recomputed "
    "(Cache-Craft, 2502.15734)",
    "kvcomm": "the same, and none is recomputed: keys and values are corrected by what the same "
    "change of beginnings did to other media (KVCOMM, 2510.12872)",
}


@dataclass(frozen=True)
class ReusePlan:
    """One mode, and the share of tokens of media seen elsewhere that layers recompute.

    Of `kvcomm` the share is that of the largest entropy up to which anchors are believed, of which
    there are `anchors` at most and must be `least`.
    """

    mode: str
    share: float = SHARE
    anchors: int = ANCHORS
    least: int = LEAST

    @property
    def prefix(self) -> bool:
        """Keys and values are reused, not encoder outputs alone."""
        return self.mode != "encoder"

    @property
    def anywhere(self) -> bool:
        """Media are reused behind another beginning, too."""
        return self.mode in ("blend", "craft", "kvcomm")

    @property
    def corrected(self) -> bool:
        """They are taken with an offset, or not at all."""
        return self.mode == "kvcomm"

    @property
    def recomputed(self) -> float:
        """Share of tokens of media seen elsewhere that layers recompute, the mean of all."""
        return 0.0 if self.corrected else self.share

    def __str__(self) -> str:
        given = {"anchors": self.anchors, "least": self.least}
        usual = {"anchors": ANCHORS, "least": LEAST}
        changed = [f"{name}={n}" for name, n in given.items() if n != usual[name]]
        knobs = f"?{'&'.join(changed)}" if changed else ""
        return f"{self.mode}:{self.share:g}{knobs}" if self.anywhere else self.mode


ALL = ReusePlan("craft", 0.0)  # takes all that was seen, wherever it goes


def parse_reuse(spec: Any) -> ReusePlan | None:
    """Read a spec; None reuses nothing. SpecError: says what is wrong and the choices."""
    if spec is None or isinstance(spec, ReusePlan):
        return spec
    if not isinstance(spec, str):
        raise SpecError(f"reuse={spec!r} is no spec; choices: {', '.join(MODES)}")
    body, asks, knobs = spec.strip().partition("?")
    name, colon, given = body.partition(":")
    if name not in MODES:
        raise SpecError(unknown("reuse", name, MODES))
    usual = ENTROPY if name == "kvcomm" else SHARE
    plan = ReusePlan(name, usual)
    if asks:
        plan = _with_knobs(spec, plan, knobs)
    if not colon:
        return plan
    if not plan.anywhere:
        raise SpecError(f"reuse={spec!r}: {name} recomputes nothing; write {name!r}")
    try:
        share = float(given)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise SpecError(f"reuse={spec!r}: {given!r} is no share from 0 to 1; write {name}:{usual}")
    return replace(plan, share=share)


def _with_knobs(spec: str, plan: ReusePlan, knobs: str) -> ReusePlan:
    """The plan with `anchors=20&least=8`; SpecError where that is wrong."""
    pairs = [each.partition("=") for each in knobs.split("&")]
    numbers = {name: int(n) for name, _, n in pairs if n.isdecimal() and n.isascii()}
    if plan.corrected and len(numbers) == len(pairs) and numbers.keys() <= {"anchors", "least"}:
        most, least = numbers.get("anchors", plan.anchors), numbers.get("least", plan.least)
        plan = replace(plan, anchors=most, least=least)
        if 1 <= plan.least <= plan.anchors:
            return plan
    raise SpecError(
        f"reuse={spec!r}: {knobs!r} are no knobs of {plan.mode}; kvcomm alone has some, of anchors "
        f"at most and at least: write 'kvcomm?anchors={ANCHORS}&least={LEAST}'"
    )


# Options of `generate` that make a cache themselves, or draft with one that they must have filled.
_OWN_CACHE = (
    "cache_implementation",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "use_mtp",
)


def check_beside(
    plan: ReusePlan | None,
    reduce: str | Sequence[Spec] | None,
    cache: Any = None,
    decode: Any = None,
    prefill: Any = None,
    generate: Mapping[str, Any] | None = None,
    config: Any = None,  # of generation, of the checkpoint
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
    if fuses := [s for s in parse(reduce) if s.method.fuses]:
        raise SpecError(
            f"reuse={str(plan)!r} does not act beside {str(fuses[0])!r}, under which keys of text "
            "depend on the media behind it; use reuse='encoder', or another stage at pre"
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
    if plan_prefill(prefill) is not None:
        raise SpecError(
            f"reuse={str(plan)!r} does not act beside prefill={str(prefill)!r}, under which keys "
            "depend on the whole prompt; use reuse='encoder', or leave prefill out"
        )
    for name in _OWN_CACHE:
        given, mend = (generate or {}).get(name), f"leave {name} out"
        if given is None:  # a checkpoint may want it, too
            given, mend = getattr(config, name, None), "set that of model.generation_config to None"
        if given is not None:
            raise SpecError(
                f"reuse={str(plan)!r} does not act beside {name}={given!r}, which wants a cache of "
                f"its own; use reuse='encoder', or {mend}"
            )
