"""Drafts of answers in a stream, which one pass of its branch verifies.

The tokens of an answer are chosen one by one as without drafts, drawn ones by the same draws, from
the logits behind drafts as long as these are what was chosen. So no answer changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.decoding.row import Costs, DraftLength
from mmfast.decoding.speculation import (
    LOOKUP,
    RECYCLE,
    DecodePlan,
    Recycler,
    TextDrafts,
    plan_decode,
)
from mmfast.models.decoder.drafters import GUESS


def plan_stream(spec: str | None, default: DecodePlan | None = None) -> DecodePlan | None:
    """Read the spec of a session or a question; None takes the default, `none` is no drafts.

    Raises:
        SpecError: A wrong spec, or drafts of a model, which has no prompt in a stream to read.
    """
    plan = default if spec is None else plan_decode(spec)
    if plan is not None and plan.kind not in (LOOKUP, RECYCLE):
        raise SpecError(
            f"decode={plan.text!r} drafts on a prompt of its own, and a stream has none that stays "
            "as it is; use 'recycle' or 'lookup'"
        )
    return plan


class DraftMemory:
    """Prices of passes, and what follows each token, as drafts of a model learn them."""

    def __init__(self) -> None:
        self._costs = {kind: Costs(0.001, 0.03, live=True) for kind in (LOOKUP, RECYCLE)}
        self._known: dict[int, Recycler] = {}

    def drafter(self, plan: DecodePlan, prompt: Sequence[int]) -> StreamDrafter:
        """Return what drafts for one answer; `prompt` is the text that it answers."""
        recycler = None
        if plan.kind == RECYCLE:
            recycler = self._known.setdefault(plan.width, Recycler(plan.width))
        return StreamDrafter(plan, self._costs[plan.kind], recycler, prompt)


class StreamDrafter:
    """Drafts for one answer, from what followed its last tokens; counts what became of them."""

    def __init__(
        self, plan: DecodePlan, costs: Costs, recycler: Recycler | None, prompt: Sequence[int]
    ) -> None:
        self.plan, self._costs = plan, costs
        self._length = DraftLength(costs, plan.least) if plan.adapt else None
        self._text, self._known = TextDrafts(plan, recycler, prompt), 0
        self.proposed = self.accepted = 0
        self.seconds = 0.0

    def propose(self, said: Sequence[int], room: int) -> list[int]:
        """Draft at most `room` tokens behind those said."""
        start, most = time.perf_counter(), min(self.plan.most, room)
        self._text.push(said[self._known :])
        self._known = len(said)
        if self._length is not None:
            most = self._length.begin(max(0, most))
        found = self._text.find(said[-1], most) if most > 0 else []
        self.seconds += time.perf_counter() - start
        return found

    def read(self, tokens: Sequence[int], logits: Tensor, seconds: float) -> None:
        """Take in the pass over the last token and its drafts: logits `[n, V]`, and its time."""
        self._costs.time(len(tokens), seconds, max(1, len(tokens) - 1), 1e-6)
        if (recycler := self._text.recycler) is not None:
            width = min(recycler.width, logits.shape[-1])
            recycler.learn(tokens, logits.topk(width, dim=-1).indices.tolist())

    def settle(self, proposed: int, accepted: int) -> None:
        """Count how many drafts of a pass stood."""
        self.proposed += proposed
        self.accepted += accepted
        if proposed and self._length is not None:
            self._length.end([GUESS] * proposed, accepted)


class DraftedTokens:
    """The logits of an answer's next tokens, read ahead behind drafts while these are chosen.

    `branch` is that of a stream on which the answer is written.
    """

    def __init__(self, branch: Any, drafter: StreamDrafter | None, limit: int) -> None:
        self._branch, self.drafter, self._limit = branch, drafter, limit
        self.fed = 0  # tokens of the answer that the branch holds and that stand
        self._drafts: list[int] = []
        self._logits: Tensor | None = None  # `[1 + drafts, V]` of the pass at hand

    def behind(self, said: Sequence[int]) -> Tensor:
        """Return the logits `[V]` behind all that was said."""
        if self._logits is not None:
            place = len(said) - self.fed - 1  # drafts that were chosen since the pass
            if said[self.fed + 1 :] == self._drafts[:place] and place < len(self._logits):
                return self._logits[place]
        self.settle(said)
        drafts: list[int] = []
        if self.drafter is not None:
            room = min(self._limit - len(said) - 1, self._branch.room - 1)
            drafts = self.drafter.propose(said, room)
        start = time.perf_counter()
        if not drafts:
            logits: Tensor = self._branch.token(said[-1])
            tokens, self._logits = [said[-1]], None
            self.fed += 1
        else:
            tokens = [said[-1], *drafts]
            self._drafts, self._logits = drafts, self._branch.tokens(tokens)
            logits = self._logits[0]
        if self.drafter is not None:
            read = logits[None] if self._logits is None else self._logits
            self.drafter.read(tokens, read, time.perf_counter() - start)
        return logits

    def settle(self, said: Sequence[int]) -> None:
        """Take back the drafts that are not what was said."""
        if self._logits is None:
            return
        chosen, stand = said[self.fed + 1 :], 0
        while stand < min(len(chosen), len(self._drafts)) and chosen[stand] == self._drafts[stand]:
            stand += 1
        self._branch.stand(1 + stand)
        if self.drafter is not None:
            self.drafter.settle(len(self._drafts), stand)
        self.fed += 1 + stand
        self._drafts, self._logits = [], None
