"""Plans of reduction for vLLM: methods and budgets, known before there is any token."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction
from mmfast.core.registry import Method, methods
from mmfast.core.spec import Spec, count, parse, run
from mmfast.core.tokens import Tokens, follow
from mmfast.models.reduction.site import Chain
from mmfast.models.reduction.tower_signals import TOWER_SIGNALS
from mmfast.vllm import VARIABLE

Grid = tuple[int, int, int]  # frames, rows, columns of tokens


@dataclass(frozen=True)
class ReducerPlan:
    """Reducers with fixed budgets, applied one after the other."""

    stages: tuple[Spec, ...]

    def __str__(self) -> str:
        return "+".join(map(str, self.stages))

    @property
    def needs(self) -> tuple[str, ...]:
        """Signals that some stage reads."""
        return tuple({need: None for stage in self.stages for need in stage.method.needs})

    def count(self, grid: Grid) -> int:
        """Return the tokens kept of an item; a budget above what there is keeps all."""
        n = math.prod(grid)
        if any(stage.method.resizes for stage in self.stages):  # a raster, which the grid decides
            needs = {name: torch.zeros(n, 1) for name in self.needs if name == "keys"}
            needs |= {name: torch.zeros(n) for name in self.needs if name.startswith("attn")}
            return self.reduce(torch.zeros(n, 1), grid, needs).keep.numel()
        for stage in self.stages:
            n = _kept(stage, n)
        return n

    def reduce(self, x: Tensor, grid: Grid, signals: Mapping[str, Tensor]) -> Chain:
        """Reduce the tokens of an item to `count(grid)` of them, as `mmfast.attach` does.

        `x` is the output of the encoder, `[N, D]`; values that are not finite count as 0.
        """
        given = {name: torch.nan_to_num(value) for name, value in signals.items()}
        attn = given.pop("attn", None)
        tokens = Tokens(torch.nan_to_num(x.detach()), attn=attn, grid=grid, signals=given)
        steps = []
        for stage in self.stages:
            step = run(replace(stage, budget=_kept(stage, tokens.n)), tokens)
            assert isinstance(step, Reduction)
            steps.append(step)
            tokens = follow(tokens, step)
        return Chain(tuple(steps))


def _kept(stage: Spec, n: int) -> int:
    budget = min(stage.budget, n) if isinstance(stage.budget, int) else stage.budget
    kept = count(budget, n)
    assert kept is not None
    return kept


def choices() -> list[str]:
    """Return the reducers that work in vLLM, as a spec names them."""
    found = [method for method in methods("reducer") if not _reason(method)]
    return [m.name if m.sites[0] == "pre" else f"{m.name}@pre" for m in found]


def _reason(method: Method) -> str:
    """Return the reason why a method cannot work in vLLM, "" if it can."""
    if "pre" not in method.sites:
        return "works where vLLM has no place for it: it gives all layers one length"
    if method.scope != "item" or {"query", "image"} & {*method.needs}:
        return "looks at the question, and vLLM stores results under the hash of the media alone"
    if method.learned:
        return "has weights of one model and reads all frames at once, which vLLM does not give it"
    if method.kind == "ranker":
        return "has weights of one model, which vLLM does not give it"
    lacking = ", ".join(sorted({*method.needs} - {"x", "grid", *TOWER_SIGNALS}))
    return lacking and f"needs {lacking}, which vLLM's vision tower does not give"


@lru_cache
def parse_plan(text: str) -> ReducerPlan:
    """Parse a spec for vLLM, such as `evs:0.25` or `evs:0.5+divprune:0.5`.

    `SpecError`: a method that cannot work here, or no fixed budget; it names the choices.
    """
    stages = parse(text.strip())
    for stage in stages:
        reason = _reason(stage.method)
        if not reason and stage.site != "pre":
            reason = f"cannot choose at site {stage.where!r} but after the vision tower"
        if reason:
            name = stage.method.name
            raise SpecError(f"{name!r} {reason}; choices: {', '.join(choices())}")
        if stage.knobs.get("parity"):
            raise SpecError(f"{str(stage)!r}: parity=true breaks the count; leave it out")
        if stage.budget is None:
            raise SpecError(
                f"{stage.method.name!r} decides its budget itself, but vLLM must know the count "
                f"beforehand; write a budget, such as '{stage.method.name}:0.25'"
            )
    if not stages:
        raise SpecError("the spec for vLLM is empty; write one, such as 'evs:0.25'")
    return ReducerPlan(tuple(stages))


def read_plan() -> ReducerPlan:
    """Return the plan of this process, from `MMFAST_VLLM_REDUCE`."""
    return parse_plan(os.environ[VARIABLE])
