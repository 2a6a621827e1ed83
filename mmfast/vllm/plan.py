"""Plans of reduction for vLLM: methods and budgets, known before there is any token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method, methods
from mmfast.core.spec import Spec, count, parse, run
from mmfast.core.tokens import Tokens, follow

KEY = "mmfast_reduce"  # in hf_overrides and mm_processor_kwargs
VARIABLE = "MMFAST_VLLM_REDUCE"
_OWN = frozenset({"x", "grid"})  # inputs that come from the encoder's output alone


@dataclass(frozen=True)
class ReducerPlan:
    """Reducers with fixed budgets, applied one after the other.

    Attributes:
        stages: Stages of a spec, each with a budget.
    """

    stages: tuple[Spec, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.stages))

    def count(self, n: int) -> int:
        """Return the tokens kept of `n`; a budget above `n` keeps all."""
        for stage in self.stages:
            n = _kept(stage, n)
        return n

    def reduce(self, x: Tensor, grid: tuple[int, int, int]) -> Reduction:
        """Reduce the tokens of a video as `mmfast.reduce` does.

        Args:
            x: Output of the encoder for one video, `[N, D]`; values that are not finite count as 0.
            grid: Frames, rows and columns, whose product is N.

        Returns:
            A Reduction onto `count(N)` tokens.
        """
        tokens = Tokens(torch.nan_to_num(x.detach()), grid=grid)
        whole = Reduction.identity(tokens.n, device=x.device)
        for stage in self.stages:
            n = tokens.n
            step = run(replace(stage, budget=_kept(stage, n)), tokens)
            assert isinstance(step, Reduction)
            whole, tokens = whole.then(step), follow(tokens, step)
        return whole


def _kept(stage: Spec, n: int) -> int:
    budget = min(stage.budget, n) if isinstance(stage.budget, int) else stage.budget
    kept = count(budget, n)
    assert kept is not None
    return kept


def choices() -> list[str]:
    """Return the names of the reducers that work in vLLM."""
    return [method.name for method in methods("reducer") if not _reason(method)]


def _reason(method: Method) -> str:
    """Return the reason why a method cannot work in vLLM, "" if it can."""
    if "pre" not in method.sites:
        return "works inside the model, where vLLM gives all layers one length"
    if method.scope != "item" or {"query", "image"} & {*method.needs}:
        return "looks at the question, and vLLM stores results under the hash of the media alone"
    if not {*method.needs} <= _OWN:
        lacking = ", ".join(sorted({*method.needs} - _OWN))
        return f"needs {lacking}, which vLLM's vision tower does not give"
    return ""


def parse_plan(text: str, rate: float | None = None) -> ReducerPlan:
    """Parse a spec for vLLM.

    Args:
        text: A spec such as `evs:0.25` or `evs:0.5+divprune:0.5`; one stage may omit its budget.
        rate: vLLM's pruning rate, which is then the budget.

    Raises:
        SpecError: A method that cannot work here, or no fixed budget; names the choices.
    """
    share = None if rate is None else round(1.0 - rate, 9)
    stages = parse(_with_budget(text, share))
    for stage in stages:
        reason = _reason(stage.method)
        if not reason and stage.site != "pre":
            reason = f"cannot choose at site {stage.where!r} but after the vision tower"
        if reason:
            name = stage.method.name
            raise SpecError(f"{name!r} {reason}; choices: {', '.join(choices())}")
        if stage.knobs.get("parity"):
            raise SpecError(f"{str(stage)!r}: parity=true breaks the count; leave it out")
    if share is not None and any(stage.budget is None for stage in stages):
        stages = tuple(s if s.budget is not None else replace(s, budget=share) for s in stages)
    open_ended = [stage.method.name for stage in stages if stage.budget is None]
    if not stages or open_ended:
        what = f"{open_ended[0]!r} decides its budget itself" if open_ended else "the spec is empty"
        raise SpecError(
            f"{what}, but vLLM must know the count beforehand; write a budget, such as 'evs:0.25'"
        )
    return ReducerPlan(stages)


def _with_budget(text: str, share: float | None) -> str:
    """Complete a method without a budget by vLLM's rate."""
    name = text.strip()
    return f"{name}:{share}" if share is not None and name.isidentifier() else name


def read_plan(
    mm_config: Any, hf_config: Any, environ: Mapping[str, str] | None = None
) -> ReducerPlan | None:
    """Return the plan of a server; None where no spec is given.

    Args:
        mm_config: vLLM's `MultiModalConfig`, whose `mm_processor_kwargs` come first.
        hf_config: The model's config with the `--hf-overrides`, second.
        environ: The environment with `MMFAST_VLLM_REDUCE`, third.

    Raises:
        SpecError: The spec is wrong (see `parse_plan`), or vLLM's pruning is off.
    """
    given = (getattr(mm_config, "mm_processor_kwargs", None) or {}).get(KEY)
    text = given or getattr(hf_config, KEY, None)
    text = text or (os.environ if environ is None else environ).get(VARIABLE)
    if not text:
        return None
    rate = getattr(mm_config, "video_pruning_rate", None)
    if not rate:
        raise SpecError(
            f"mmfast is to keep {text!r} of videos, but vLLM's pruning is off; start it with "
            "--video-pruning-rate, such as 0.75 for a quarter of the tokens"
        )
    return parse_plan(str(text), rate)
