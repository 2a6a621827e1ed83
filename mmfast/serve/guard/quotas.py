"""How much one caller may ask: requests, bytes and tokens a minute, and how many at once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from mmfast.serve.guard.errors import ApiError, busy

_CALLERS = 10_000  # remembered; more only where addresses are made up


class Bucket:
    """Fills steadily up to a minute's worth; what is taken later than asked may overdraw it."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self._rate, self._most = per_minute / 60.0, max(per_minute, 1.0)
        self._level, self._clock, self._then = self._most, clock, clock()

    def wait(self, amount: float) -> float:
        """Seconds until so much is there."""
        now = self._clock()
        self._level = min(self._most, self._level + (now - self._then) * self._rate)
        self._then = now
        missing = min(amount, self._most) - self._level
        return max(0.0, missing / self._rate)

    def take(self, amount: float) -> None:
        """Take it, there or not."""
        self._level -= amount


@dataclass
class _Caller:
    buckets: dict[str, Bucket] = field(default_factory=dict)
    running: int = 0


@dataclass(frozen=True)
class Rates:
    """Limits of one caller; 0 does not limit."""

    requests: float = 0.0  # a minute
    bytes: float = 0.0  # of bodies a minute
    tokens: float = 0.0  # of answers and prompts a minute
    running: int = 0  # at once


class Quotas:
    """All callers of a server, in its event loop.

    Args:
        rates: Of each.
        clock: Seconds.
    """

    def __init__(self, rates: Rates, clock: Callable[[], float] = time.monotonic) -> None:
        self._rates, self._clock = rates, clock
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def enter(self, who: str) -> None:
        """One more request; `leave` must follow.

        Raises:
            ApiError: 429 with Retry-After.
        """
        caller, rates = self._caller(who), self._rates
        if rates.running and caller.running >= rates.running:
            raise busy(f"{rates.running} requests of this caller run already", 1.0, "concurrency")
        for name, bucket in caller.buckets.items():
            wait = bucket.wait(1.0)
            if wait > 0:
                most = getattr(rates, name)
                raise busy(f"over {most:g} {name} a minute: wait", wait, "rate_limit_exceeded")
        if "requests" in caller.buckets:
            caller.buckets["requests"].take(1.0)
        caller.running += 1

    def leave(self, who: str) -> None:
        """It is over."""
        caller = self._callers.get(who)
        if caller is not None:
            caller.running -= 1

    def spend(self, who: str, kind: str, amount: float) -> None:
        """So many `bytes` or `tokens` were used; the next request waits for what is overdrawn."""
        bucket = self._caller(who).buckets.get(kind)
        if bucket is not None:
            bucket.take(amount)

    def check(self, who: str, kind: str) -> ApiError | None:
        """The error, where a bucket is overdrawn."""
        bucket = self._caller(who).buckets.get(kind)
        wait = bucket.wait(0.0) if bucket is not None else 0.0
        text = f"over {getattr(self._rates, kind):g} {kind} a minute: wait"
        return busy(text, wait, "rate_limit_exceeded") if wait > 0 else None

    def _caller(self, who: str) -> _Caller:
        found = self._callers.pop(who, None)
        if found is None:
            kinds = ("requests", "bytes", "tokens")
            found = _Caller(
                {k: Bucket(getattr(self._rates, k), self._clock) for k in kinds if self._limits(k)}
            )
            while len(self._callers) >= _CALLERS:
                self._forget()
        self._callers[who] = found
        return found

    def _limits(self, kind: str) -> bool:
        return bool(getattr(self._rates, kind))

    def _forget(self) -> None:
        """Drop whoever has been quiet the longest."""
        idle = next((who for who, each in self._callers.items() if not each.running), None)
        self._callers.pop(idle if idle is not None else next(iter(self._callers)))
