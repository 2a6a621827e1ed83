"""Spec strings of sparse prefill, such as ``"flexprefill:0.95"``."""

from __future__ import annotations

from dataclasses import dataclass

from mmfast.core.blocks import BlockSelector
from mmfast.core.errors import SpecError
from mmfast.core.spec import Budget, Spec, parse

LEAST, BLOCK = 4096, 128  # tokens from which on methods choose, and tokens of a block


@dataclass(frozen=True)
class PrefillPlan:
    """One method with its settings."""

    spec: Spec

    def __str__(self) -> str:
        return str(self.spec).replace("@prefill", "", 1)

    @property
    def whole(self) -> bool:
        """All of the attention, or all blocks: nothing is left out."""
        return self.spec.whole

    def selector(self) -> BlockSelector:
        """The method as it chooses; SpecError for a wrong knob."""
        chooser: BlockSelector = self.spec.method.fn(self.spec.budget, **self.spec.knobs)
        return chooser


def plan_prefill(text: str | PrefillPlan | None) -> PrefillPlan | None:
    """Read a spec such as `"zipvl:0.97"`; None or "" is none, and a plan is returned as it is.

    Raises:
        SpecError: A wrong name, knob or budget, or several methods.
    """
    if isinstance(text, PrefillPlan):
        return text
    specs = parse(text, kind="prefill")
    if len(specs) > 1:
        names = " and ".join(repr(spec.method.name) for spec in specs)
        raise SpecError(f"{names} both choose what a prompt reads; keep one of them")
    if not specs:
        return None
    plan = PrefillPlan(specs[0])
    plan.selector()
    return plan


@dataclass(frozen=True)
class BlockSettings:
    """Settings that all methods share.

    Attributes:
        budget: Share of the attention that is to be kept, or of the keys that are read.
        block: Tokens of a block.
        least: Tokens of a part of a prompt from which on it chooses.
        share: Heads that share keys share the choice.
    """

    budget: float
    block: int = BLOCK
    least: int = LEAST
    share: bool = True

    def __post_init__(self) -> None:
        if self.block < 1 or self.least < 1:
            raise SpecError(
                f"block={self.block}, least={self.least}: choose at least 1 token of both, as in "
                f"'?block={BLOCK}&least={LEAST}'"
            )


def share_of(name: str, budget: Budget, default: float, meaning: str) -> float:
    """The budget as a share; SpecError for a number of tokens, which the method cannot keep to."""
    if budget is None:
        return default
    if isinstance(budget, int):
        raise SpecError(
            f"{name!r} takes a share of {meaning}, with a dot, such as '{name}:{default}', "
            f"not {budget}"
        )
    return budget
