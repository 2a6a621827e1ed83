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
    """Reducers with fixed budgets, applied one after the other."""

    stages: tuple[Spec, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.stages))

    def count(self, n: int) -> int:
        """Return the tokens kept of `n`; a budget above `n` keeps all."""
        for stage in self.stages:
            n = _kept(stage, n)
        return n

    def reduce(self, x: Tensor, grid: tuple[int, int, int]) -> Reduction:
        """Reduce the tokens of a video to `count(N)` of them, as `mmfast.reduce` does.

        `x` is the output of the encoder, `[N, D]`; values that are not finite count as 0. N is the
        product of `grid`: frames, rows, columns.
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
    if method.resizes:
        return "may keep less than its budget, and vLLM must know the count"
    if method.scope != "item" or {"query", "image"} & {*method.needs}:
        return "looks at the question, and vLLM stores results under the hash of the media alone"
    if not {*method.needs} <= _OWN:
        lacking = ", ".join(sorted({*method.needs} - _OWN))
        return f"needs {lacking}, which vLLM's vision tower does not give"
    return ""


def parse_plan(text: str, rate: float | None = None) -> ReducerPlan:
    """Parse a spec for vLLM, such as `evs:0.25` or `evs:0.5+divprune:0.5`.

    One stage may omit its budget, which then follows from vLLM's pruning rate. `SpecError`: a
    method that cannot work here, or no fixed budget; it names the choices.
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
    name = text.strip()
    return f"{name}:{share}" if share is not None and name.isidentifier() else name


def read_plan(
    mm_config: Any, hf_config: Any, environ: Mapping[str, str] | None = None
) -> ReducerPlan | None:
    """Return the plan of a server; None where no spec is given.

    The spec is taken from `mm_processor_kwargs` of vLLM's config, else from the `--hf-overrides`,
    else from `MMFAST_VLLM_REDUCE`. `SpecError`: it is wrong, or vLLM's pruning is off.
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
