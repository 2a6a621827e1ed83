"""Answers that an engine checks by itself: the whole model reads them again, behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from cachetools import LRUCache

from mmfast.core.spec import SelfCheck
from mmfast.core.trace import Row
from mmfast.decoding.speculation import plan_decode
from mmfast.models.context import placeholders
from mmfast.pipelines.planning import reread
from mmfast.planner.plan import Plan
from mmfast.planner.raised import RaisedBudget
from mmfast.prefill.plan import plan_prefill
from mmfast.serve.engine.adapters import using
from mmfast.serve.engine.base import LOG, SamplingOptions
from mmfast.serve.engine.decode import GREEDY
from mmfast.serve.engine.request import ActiveRequest
from mmfast.serve.engine.sequential import stops_of
from mmfast.serve.engine.slicer import Slicer

KEPT = 4  # answers whose media are held for their check
BUDGETS = 64  # the one that was used least recently starts anew
UNITS = 4  # units of work, of which prompts that wait get all but one
# Options of a request under which the likeliest token is not that of `generate`
_RULES: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "logit_bias", "grammar")
_RULES += ("min_tokens", "ignore_eos")


def unchecked(answer: ActiveRequest) -> str:
    """Return the option under which an answer is no case for a check, as `name=value`, or ""."""
    sampling, plain = answer.sampling, SamplingOptions()
    drafts, modules = plan_decode(answer.decode), answer.request.options.modules
    odd = {name: getattr(sampling, name) for name in _RULES}
    odd = {name: value for name, value in odd.items() if value != getattr(plain, name)}
    if sampling.temperature >= GREEDY:
        odd["temperature"] = sampling.temperature
    if drafts is not None and not drafts.exact:
        odd["decode"] = answer.decode
    odd |= {"cache": answer.cache} if answer.cache else {}
    odd |= {"modules": modules} if modules else {}
    return next((f"{name}={value!r:.60}" for name, value in odd.items()), "")


@dataclass(frozen=True, eq=False)
class KeptAnswer:
    """An answer that is to be read again, and what that takes."""

    answer: ActiveRequest
    plan: Plan
    raised: RaisedBudget
    inputs: dict[str, Any]  # of its prompt, as the processor returned them
    tokens: list[int]  # of the answer so far

    @property
    def size(self) -> int:
        """Tokens of prompt and answer together."""
        return int(self.inputs["input_ids"].shape[1]) + len(self.tokens)


class AnswerChecks:
    """Budgets of `reduce="auto?check=…"`, and the answers that are read again for them.

    A check begins when its answer was sent. It runs on a twin of the model in slices like those of
    prompts: decoding goes on between them, and prompts that wait get three units for one of a
    check. The server's own spec has one budget, a number of rungs that all requests share; a spec
    that a request names has one of its tenant. `served` gets the payer and the tokens that are
    read for it.
    """

    def __init__(self, twin: Callable[[], Any], served: Callable[[str, float], None]) -> None:
        self._twin, self._served = twin, served
        self._model: Any = None  # made for the first check
        self._slicer = Slicer()
        self._budgets: LRUCache[tuple[str | None, SelfCheck], RaisedBudget] = LRUCache(BUDGETS)
        self._written = list[KeptAnswer]()  # which have not ended yet
        self._due = deque[KeptAnswer]()
        self._now: KeptAnswer | None = None
        self._call: Generator[None, None, Row] | None = None
        self._units = 0
        self._figures = {"checked_answers": 0, "checked_tokens": 0, "standing_tokens": 0}
        self._figures |= {"checks_failed": 0, "checks_left_out": 0}

    def budget(self, answer: ActiveRequest) -> RaisedBudget | None:
        """Return the budget of a request that is planned; None where it is not checked."""
        if (check := answer.target.check) is None:
            return None
        key = answer.request.tenant if answer.request.options.reduce else None, check
        return self._budgets.setdefault(key, RaisedBudget(check))

    def keep(self, answer: ActiveRequest, plan: Plan, raised: RaisedBudget) -> None:
        """Hold what a check takes of an answer that begins, if it is one of those to be checked."""
        if not raised.due(1) or (plan.spec is None and plan.rung < 1):
            return
        waiting = len(self._written) + len(self._due) + (self._now is not None)
        if waiting >= KEPT:
            self._figures["checks_left_out"] += 1
            answer.notes.append(f"self-check: left out, as {waiting} answers wait for theirs")
            return
        assert answer.prepared is not None
        answer.said = []
        kept = KeptAnswer(answer, plan, raised, answer.prepared.inputs, answer.said)
        self._written.append(kept)
        answer.notes.append("self-check: behind this answer")

    @property
    def busy(self) -> bool:
        """True while an answer is held."""
        return bool(self._written or self._due or self._now)

    @property
    def held(self) -> int:
        """Tokens whose keys and values the running check may hold."""
        return 0 if self._now is None else self._now.size

    def takes(self, prompts: bool, room: Callable[[int], bool]) -> bool:
        """Return True if the next unit of work is a check's, which has `room` for its tokens.

        `prompts` tells whether prompts wait for it, too.
        """
        for kept in [each for each in self._written if each.answer.over]:
            self._written.remove(kept)
            writer = kept.answer.writer
            if writer is not None and writer.over and not kept.answer.broken:
                self._due.append(kept)
        if self._now is None and not (self._due and room(self._due[0].size)):
            return False
        self._units = (self._units + 1) % UNITS if prompts else 0
        return self._units == 0

    def step(self, budget: float, work: float) -> None:
        """Read a slice, of so many seconds and multiplications at most."""
        try:
            if self._call is None:
                self._begin()
            assert self._call is not None
            self._slicer.allow(budget, work)
            next(self._call)
        except StopIteration as end:
            self._figures["checked_answers"] += 1
            self._figures["checked_tokens"] += end.value.tokens_in
            self._figures["standing_tokens"] += end.value.tokens_out
        except Exception:  # of the check alone: the answer was sent, and the budget stays
            LOG.warning("an answer could not be checked", exc_info=True)
            self._figures["checks_failed"] += 1
        else:
            return
        self._call = self._now = None

    def clear(self) -> None:
        """Forget all answers."""
        if self._call is not None:
            self._call.close()
        self._call = self._now = None
        self._written.clear()
        self._due.clear()

    def close(self) -> None:
        """Forget all answers and end the thread."""
        self.clear()
        self._slicer.close()

    def gauges(self) -> dict[str, float]:
        """Return the figures for `Health`; none where nothing was to be checked."""
        most = max((each.value for each in [*self._budgets.values()]), default=None)
        return {} if most is None else {**self._figures, "checks_raised": float(most)}

    def _begin(self) -> None:
        kept = self._now = self._due.popleft()
        self._model = self._model or self._twin()
        reads = (kept.plan.spec is not None) + (kept.plan.rung > 0)
        self._served(kept.answer.payer, reads * kept.size)
        self._call = self._slicer.run(partial(self._read, kept), stops_of(self._model, kept.inputs))

    @torch.inference_mode()
    def _read(self, kept: KeptAnswer) -> Row:
        answer, model, row = kept.answer, self._model, Row("self-check")
        tokens = kept.inputs["input_ids"].new_tensor([kept.tokens])
        blocked = {*placeholders(model), *(model.generation_config.suppress_tokens or ())}
        how: dict[str, Any] = {"do_sample": False, "num_beams": 1}
        how |= {"max_new_tokens": len(kept.tokens)}
        how |= {"suppress_tokens": sorted(blocked) or None}
        if (penalty := answer.sampling.repetition_penalty) is not None:
            how |= {"repetition_penalty": penalty}
        sparse = plan_prefill(answer.prefill)
        pipe = SimpleNamespace(model=model, encoder=None, prefill=sparse, run=self._generate)
        with using((answer.request.adapter,)):
            reread(pipe, kept.raised, kept.plan, kept.inputs, how, tokens, row)
        return row

    def _generate(self, inputs: dict[str, Any], how: dict[str, Any], **more: Any) -> Any:
        return self._model.generate(**inputs, **how, **more)
