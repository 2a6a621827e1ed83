"""Roles of the workers on Ray, and their change under load.

Every worker holds the whole model, so a role only says which new work goes to it. Answers under way
end where they began, and nothing is lost when a role changes.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mmfast.planner.roles import (
    COMBINED,
    STAGES,
    RoleAdvice,
    StageLoad,
    advise,
    moves,
    predicted,
)

PATIENCE = 20.0  # seconds between two changes
GAIN = 0.9  # share of the strain below which a change is worth it
WINDOW = 60.0  # seconds over which arrivals are counted
FEWEST = 8  # requests after which the work of a stage is known


@dataclass(frozen=True)
class StageFigures:
    """Work of a process at its stages since it started.

    `seconds` and `done` are the work and the requests of each stage, `steps` the sums over steps of
    decoding: one, rows, seconds, rows squared, rows times seconds.
    """

    seconds: tuple[float, ...] = (0.0, 0.0, 0.0)
    done: tuple[int, ...] = (0, 0, 0)
    steps: tuple[float, ...] = (0.0,) * 5


def loads_of(figures: Sequence[StageFigures], slots: int) -> tuple[StageLoad, ...] | None:
    """Return the work at each stage, from what all workers have done; None if that is too little.

    The seconds of a decoding step are a line through the rows that it had.
    """
    seconds = [sum(each.seconds[i] for each in figures) for i in range(3)]
    done = [sum(each.done[i] for each in figures) for i in range(3)]
    if min(done) < FEWEST:
        return None
    count, rows, took, squares, both = (sum(each.steps[i] for each in figures) for i in range(5))
    spread = count * squares - rows * rows
    slope = (count * both - rows * took) / spread if spread > 0 else took / max(1.0, rows)
    slope = min(max(0.0, slope), took / max(1.0, rows))  # the rest is the cost of a step itself
    one = (took - slope * rows) / max(1.0, count) + slope
    gain = tuple(n * one / (one + slope * (n - 1)) for n in range(1, slots + 1))
    decode = StageLoad("decode", max(1e-6, one * rows / done[2]), 1.0, gain)
    names = zip(STAGES, seconds, done, strict=True)
    return (*(StageLoad(n, max(1e-6, s / d)) for n, s, d in [*names][:2]), decode)


class RoleBoard:
    """Roles of workers by number, and the requests that each of them holds.

    Any thread may use it.
    """

    def __init__(self, workers: int, roles: Sequence[str] | None = None) -> None:
        self.roles = list(roles or [COMBINED] * workers)
        self.live = [True] * workers
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()

    def choose(self) -> tuple[int, int, int]:
        """Return the workers that encode, fill and decode the next request, and count it there.

        Those with the fewest requests; a combined one does all of it. Where no live worker has a
        role, any other does its work, since all of them can.
        """
        with self._lock:
            first = self._least("encode")
            whole = self.roles[first] == COMBINED
            fills, decodes = (first if whole else self._least(stage) for stage in STAGES[1:])
            self._held.update({first, fills, decodes})
            return first, fills, decodes

    def release(self, workers: Sequence[int]) -> None:
        """Forget a request that is over."""
        with self._lock:
            self._held.subtract(set(workers))

    def encoders(self, first: int, most: int) -> list[int]:
        """Return up to `most` workers that may share the media of a request, beginning with one."""
        with self._lock:
            able = [i for i in self._able("encode") if i != first]
            return [first, *sorted(able, key=lambda i: self._held[i])][: max(1, most)]

    def change(self, roles: Mapping[int, str]) -> None:
        """Give workers other roles, for requests to come."""
        with self._lock:
            for number, role in roles.items():
                self.roles[number] = role

    def counts(self) -> dict[str, int]:
        """Return the workers of each role."""
        return dict(Counter(self.roles))

    def _able(self, stage: str) -> list[int]:
        live = [i for i, lives in enumerate(self.live) if lives] or [*range(len(self.live))]
        return [i for i in live if self.roles[i] in (stage, COMBINED)] or live

    def _least(self, stage: str) -> int:
        return min(self._able(stage), key=lambda i: self._held[i])


class RoleController:
    """Changes the roles of a board where the planner expects clearly less strain."""

    def __init__(self, board: RoleBoard, slots: int) -> None:
        self._board, self._slots = board, slots
        self._arrivals: deque[float] = deque()
        self._began: float | None = None
        self._changed = -PATIENCE
        self.advice: RoleAdvice | None = None

    def arrived(self, now: float) -> None:
        """Count a request."""
        self._arrivals.append(now)
        self._began = now if self._began is None else self._began

    def rate(self, now: float) -> float:
        """Return the requests a second of late."""
        while self._arrivals and self._arrivals[0] < now - WINDOW:
            self._arrivals.popleft()
        span = min(WINDOW, now - (now if self._began is None else self._began))
        return len(self._arrivals) / max(1.0, span)

    def gauges(self) -> dict[str, float]:
        """Return the role of every worker, and the advice where there is one, as figures."""
        found = {f"worker_{i}_{role}": 1.0 for i, role in enumerate(self._board.roles)}
        advised = {} if self.advice is None else self.advice.roles
        return found | {f"advised_{role}": float(count) for role, count in advised.items()}

    def decide(self, figures: Sequence[StageFigures], now: float) -> dict[int, str]:
        """Return what was changed; the advice is renewed in any case."""
        loads, rate = loads_of(figures, self._slots), self.rate(now)
        if loads is None:
            return {}
        workers = len(self._board.roles)
        self.advice = advise(loads, rate, workers)
        held = self._board.counts()
        complete = COMBINED in held or all(stage in held for stage in STAGES)
        before = predicted(held, loads, rate) if complete else None
        worth = before is None or self.advice.strain < GAIN * before.strain
        if not worth or now - self._changed < PATIENCE:
            return {}
        found = moves(self._board.roles, self.advice.roles)
        self._board.change(found)
        if found:
            self._changed = now
        return found
