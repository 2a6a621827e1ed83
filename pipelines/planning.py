"""The planner beside a pipeline: what it plans for, and how it tries a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from mmfast.attach import attach, turn_of
from mmfast.core.spec import SelfCheck
from mmfast.core.trace import Row, Trace
from mmfast.models.cost import FirstToken
from mmfast.models.decoder.agreement import check_undrawn, chosen_tokens
from mmfast.pipelines.generation import beams_of
from mmfast.planner.auto import announced, row_name, say
from mmfast.planner.plan import Plan
from mmfast.planner.planner import Planner
from mmfast.planner.raised import RaisedBudget
from mmfast.planner.target import Target

Tick = Callable[[int, int, str | None], None]
# Arguments of `generate` that are of the answer, not of a model that reads it again
_OF_ANSWERS = ("seed", "stop_strings", "streamer", "early_stopping", "length_penalty")


class PipelinePlanner:
    """Plans the calls of one pipeline; measures the device when the first plan is asked for."""

    def __init__(self, pipe: Any, name: Any, check: SelfCheck | None = None) -> None:
        self.pipe = pipe
        known = isinstance(name, (str, Path))
        self.raised = None if check is None else RaisedBudget(check)
        rows = row_name(name) if known or name is None else None
        self.planner = Planner(pipe.model, rows, drafts=getattr(pipe, "drafts", None))

    def plan(
        self,
        inputs: Mapping[str, Any],
        items: Sequence[int],
        target: Target,
        started: float,
        strict: bool = False,
        tick: Tick | None = None,
        how: Mapping[str, Any] | None = None,
        raised: RaisedBudget | None = None,
    ) -> tuple[Plan, float]:
        """A plan, and the milliseconds that measuring the device took on the way.

        `how` are arguments of `generate`, which bound the answer; `raised` is a budget in place of
        its own.
        """
        spent = (time.perf_counter() - started) * 1e3
        kind = "video" if "pixel_values_videos" in inputs else "image"
        if kind == "image" and max(items) > 1:
            kind = "multi-image"
        before, budget = self.planner.learner.measuring_ms, raised or self.raised
        shown = nullcontext(tick) if tick else announced(self.planner.learner)
        with turn_of(self.pipe.model), shown as tick:
            plan = self.planner.plan(
                inputs,
                target,
                run=lambda spec: self._try(inputs, spec),
                spent=spent,
                strict=strict,
                kind=kind,
                tick=tick,
                answer=0 if how is None else longest(how, inputs["input_ids"].shape[1]),
                beams=1 if how is None else beams_of(self.pipe.model, how),
                caches=self._bare and target.check is None,
                raised=0 if budget is None else budget.value,
            )
        return plan, self.planner.learner.measuring_ms - before

    def planned(
        self,
        inputs: Mapping[str, Any],
        items: Sequence[int],
        target: Target,
        started: float,
        how: Mapping[str, Any],
        trace: Trace,
    ) -> tuple[Plan | None, float]:
        """A plan with its row in a trace, and the start without the time of measuring.

        There is none for a prompt without media, of which a target is a warning.
        """
        if not any(items):
            if not target.auto:
                trace.warn(f"{target} is planned of media, and the prompt has none: all tokens")
            trace.add("plan", 0, 0, 0.0, "no media: nothing to plan")
            return None, started
        if target.check is not None:
            check_undrawn(f"reduce={target.check.text!r}", self.pipe.model, how)
        with trace.stage("plan") as row:
            given = inputs, items, target, started, False, self.pipe.tick
            plan, measuring = self.plan(*given, how=how)
            row.method = say(plan)
        if measuring:  # the device, once and for all: no part of answering
            trace.rows[-1].ms -= measuring
            trace.add("measure device", 0, 0, measuring)
        return plan, started + measuring / 1e3

    def check(
        self,
        plan: Plan,
        inputs: Mapping[str, Any],
        how: Mapping[str, Any],
        answers: Tensor,
        trace: Trace,
    ) -> None:
        """Let the whole model read answers `[B, n]` again, where they are due, and note it.

        Under a raised budget the rung below reads them, too, as nothing else tells whether it would
        do. An error on the way is a warning, and the budget stays.
        """
        raised = self.raised
        if raised is None or not raised.due(len(answers)):
            return
        with trace.stage("self-check") as row, turn_of(self.pipe.model):
            try:
                row.method = reread(self.pipe, raised, plan, inputs, how, answers, row)
            except Exception as error:  # the answer is there, and worth more than its check
                row.method = "failed"
                said = f"{type(error).__name__}: {' '.join(str(error).split())}"
                trace.warn(f"an answer could not be checked, and is given as it is ({said:.300})")

    @property
    def _bare(self) -> bool:
        """The pipeline has no KV policy of its own, nor what does not go with one."""
        parts = (getattr(self.pipe, name, None) for name in ("cache", "decode", "reuse"))
        return all(part is None for part in parts)

    def _try(self, inputs: Mapping[str, Any], spec: str | None) -> float:
        first, start = FirstToken(), time.perf_counter()
        with attach(self.pipe.model, spec, self.pipe.cache, self.pipe.encoder):
            self.pipe.run(dict(inputs), streamer=first, max_new_tokens=1)
        return (first.at - start) * 1e3


def longest(how: Mapping[str, Any], prompt: int) -> int:
    """Most tokens of an answer behind a prompt; 0 where nothing bounds them."""
    most = int(how.get("max_length") or 0) - prompt
    return int(how.get("max_new_tokens") or max(0, most))


def reread(
    pipe: Any,
    raised: RaisedBudget,
    plan: Plan,
    inputs: Mapping[str, Any],
    how: Mapping[str, Any],
    answers: Tensor,
    row: Row,
) -> str:
    """Let the whole model read answers `[B, n]` again and raise the budget where too few stand.

    Args:
        pipe: Has the `model`, its `encoder` and `prefill`, and `run(inputs, how, **more)`, which
            calls `generate` as for the answers.
        raised: The budget of the plan.
        plan: What the answers were given under.
        inputs: The prompts.
        how: Arguments of `generate`.
        answers: Their tokens.
        row: Gets the tokens read and those that stand.

    Returns:
        How many tokens stand, in words, and what follows.
    """
    cut = plan.spec is not None
    if not cut and plan.rung < 1:
        return "all tokens: nothing to check"
    drafts, whole, here, below = getattr(pipe, "decode", None), answers, None, None
    # Under beams and inexact drafts an answer is not what the model thinks likeliest.
    plain = beams_of(pipe.model, how) == 1 and (drafts is None or drafts.exact)
    if cut or not plain:
        whole, real = _chosen(pipe, None, inputs, how, answers)
    if cut:
        mine = answers if plain else _chosen(pipe, plan.spec, inputs, how, answers)[0]
        here = _standing(mine, whole, real)
        row.tokens_in, row.tokens_out = here[1], here[0]
    if plan.rung > 0:
        lower, real = _chosen(pipe, plan.rungs[plan.rung - 1], inputs, how, answers)
        below = _standing(lower, whole, real)
    counts = [] if here is None else [f"{here[0]} of {here[1]} tokens stand"]
    if below is not None:
        counts.append(f"{below[0]} of {below[1]} would at {plan.rungs[plan.rung - 1]}")
    return "; ".join(filter(None, [*counts, raised.note(plan, here, below)]))


def _chosen(
    pipe: Any,
    spec: str | None,
    inputs: Mapping[str, Any],
    how: Mapping[str, Any],
    answers: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what the model would have chosen under a spec, and the places of answers."""
    rest = {k: v for k, v in how.items() if k not in _OF_ANSWERS} | {"num_beams": 1}
    with attach(pipe.model, spec, None, pipe.encoder, None, pipe.prefill):
        return chosen_tokens(partial(pipe.run, dict(inputs), rest), answers)


def _standing(tokens: Tensor, chosen: Tensor, real: Tensor) -> tuple[int, int]:
    """Tokens that stand, of all of the answers: up to the first that would not have been chosen.

    What follows another word rests on it: behind the first word of a refusal anyone goes on so.
    """
    stands = ((tokens == chosen) & real).long().cumprod(1)
    return int(stands.sum()), int(real.sum())
