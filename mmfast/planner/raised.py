"""Budgets of `reduce="auto?check=…"`, which rise while all tokens lead to other answers."""

from __future__ import annotations

import threading
from collections import deque

from mmfast.core.spec import SelfCheck
from mmfast.planner.plan import Plan

LAST = 8  # checked answers that count
_EVIDENCE = 8  # tokens of answers before their share that stands is believed

Agreed = tuple[int, int]  # tokens that stand, of how many


class RaisedBudget:
    """Rungs by which later plans keep more than the planner chose; threads may share one.

    No label is needed: the whole model reads an answer and says which of its tokens it would have
    chosen. Too few over the last answers raise the budget by a rung. A raised budget comes down by
    one when the rung below it would have said nearly what the whole model says.
    """

    def __init__(self, check: SelfCheck) -> None:
        self.check, self.value = check, 0
        self._answers, self._lock = 0, threading.Lock()
        self._here = deque[Agreed](maxlen=LAST)
        self._below = deque[Agreed](maxlen=LAST)

    def due(self, answers: int) -> bool:
        """Count answers; return True if one of them is to be checked."""
        with self._lock:
            before, self._answers = self._answers, self._answers + answers
            return before // self.check.every < self._answers // self.check.every

    def note(self, plan: Plan, here: Agreed | None, below: Agreed | None) -> str:
        """Take in how much of an answer stands under its plan and the rung below, and say so.

        What was planned before the last change no longer counts; None was not looked at.
        """
        with self._lock:
            if plan.raised != self.value:
                return "planned before the last change"
            self._here.extend([] if here is None else [here])
            self._below.extend([] if below is None else [below])
            share = _share(self._here)
            if share is not None and share < self.check.least:
                if plan.rung + 1 == len(plan.rungs):
                    return "no more tokens within the target"
                return self._change(1, f"{share:.0%} stand: later answers keep more")
            share = _share(self._below) if len(self._below) == LAST else None
            if share is not None and self.value and share >= (1 + self.check.least) / 2:
                return self._change(-1, f"{share:.0%} would stand: later answers keep less")
            return ""

    def _change(self, by: int, said: str) -> str:
        self.value += by
        self._here.clear()
        self._below.clear()
        return said


def _share(seen: deque[Agreed]) -> float | None:
    """Share of the tokens that stand; None where there are too few of them."""
    total = sum(count for _, count in seen)
    return sum(stand for stand, _ in seen) / total if total >= _EVIDENCE else None
