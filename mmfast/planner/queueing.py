"""Waiting times of a server under load, simulated from service times measured alone.

A server is a row of stations: one for a whole engine, or encoders, prefill and decoders one behind
the other (DistServe, 2401.09670; EPD, 2501.05460).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Station:
    """Equal replicas behind one queue; each works on up to `slots` requests at once.

    `gain[n - 1]` is the work in seconds alone that a replica does in a second on n requests at
    once; the last value holds for more of them.
    """

    replicas: int = 1
    slots: int = 1
    gain: tuple[float, ...] = (1.0,)

    def speed(self, n: int) -> float:
        """Return the speed of one of n requests on a replica; 1 is that of a request alone."""
        return self.gain[min(n, len(self.gain)) - 1] / n


@dataclass(frozen=True)
class LoadFigures:
    """Requests under load: seconds of those answered, the number refused, answers a second."""

    seconds: tuple[float, ...]
    refused: int
    rate: float

    def quantile(self, share: float) -> float:
        """Return the seconds within which a share of the requests is answered."""
        return float(np.quantile(self.seconds, share)) if self.seconds else math.nan


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """Return the times of `count` arrivals at random, `rate` a second."""
    dice = random.Random(seed)
    return list(itertools.accumulate(dice.expovariate(rate) for _ in range(count)))


@dataclass(eq=False)
class _Visit:
    came: float
    work: Sequence[float]
    left: float = 0.0


def simulate(
    stations: Sequence[Station],
    times: Sequence[float],
    work: Sequence[Sequence[float]],
    room: float = math.inf,
) -> LoadFigures:
    """Simulate requests that come at `times`, with `work` in seconds alone in each station.

    With more than `room` requests in the server at once, the last to come are refused.
    """
    coming = [_Visit(*pair) for pair in zip(times, work, strict=True)][::-1]
    waiting: list[list[_Visit]] = [[] for _ in stations]
    working: list[list[list[_Visit]]] = [[[] for _ in range(s.replicas)] for s in stations]
    seconds, now, inside, refused = list[float](), 0.0, 0, 0
    while coming or inside:
        active = [
            (i, mine, visit, stations[i].speed(len(mine)))
            for i, replicas in enumerate(working)
            for mine in replicas
            for visit in mine
        ]
        ends = [visit.left / speed for *_, visit, speed in active]
        step = max(0.0, min([*ends, *(each.came - now for each in coming[-1:])]))
        now += step
        for i, mine, visit, speed in active:
            visit.left -= step * speed
            if visit.left <= 1e-9:
                mine.remove(visit)
                if i + 1 < len(stations):
                    waiting[i + 1].append(visit)
                else:
                    inside -= 1
                    seconds.append(now - visit.came)
        while coming and coming[-1].came <= now:
            visit, full = coming.pop(), inside >= room
            refused, inside = refused + full, inside + (not full)
            waiting[0] += [] if full else [visit]
        for i, station in enumerate(stations):
            while waiting[i] and len(least := min(working[i], key=len)) < station.slots:
                least.append(visit := waiting[i].pop(0))
                visit.left = visit.work[i]
    return LoadFigures(tuple(seconds), refused, len(seconds) / now if now else math.nan)


def splits(
    replicas: int, stations: Sequence[Station], times: Sequence[float], work: Sequence[Any]
) -> list[tuple[tuple[int, ...], LoadFigures]]:
    """Simulate every split of `replicas` over stations; the least 95th percentile comes first."""
    counts = itertools.product(range(1, replicas + 1), repeat=len(stations))
    found = []
    for many in (each for each in counts if sum(each) == replicas):
        row = [replace(s, replicas=n) for s, n in zip(stations, many, strict=True)]
        found.append((many, simulate(row, times, work)))
    return sorted(found, key=lambda both: both[1].quantile(0.95))
