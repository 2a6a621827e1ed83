"""Waiting times of a server under load, simulated from service times measured alone."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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


def simulate(
    times: Sequence[float], work: Sequence[float], gain: Sequence[float], room: float = math.inf
) -> LoadFigures:
    """Simulate requests that come at `times` and take `work` seconds alone.

    Up to `len(gain)` share the server, the others wait in a queue; with more than `room` in all,
    the last to come are refused. `gain[n - 1]` is the work in seconds alone that is done in a
    second on n requests at once.
    """
    coming, waiting = list(zip(times, work, strict=True))[::-1], list[tuple[float, float]]()
    left = list[list[float]]()  # seconds of work, and time of arrival, of what shares the server
    seconds, now, refused = list[float](), 0.0, 0
    while coming or left:
        speed = gain[len(left) - 1] / len(left) if left else 1.0
        ends = [each[0] / speed for each in left]
        step = max(0.0, min([*ends, *(at - now for at, _ in coming[-1:])]))
        now += step
        for each in left:
            each[0] -= step * speed
        seconds += [now - came for rest, came in left if rest <= 1e-9]
        left = [each for each in left if each[0] > 1e-9]
        while coming and coming[-1][0] <= now:
            full = len(left) + len(waiting) >= room
            waiting += [] if full else coming[-1:]
            refused, _ = refused + full, coming.pop()
        while waiting and len(left) < len(gain):
            left.append([*waiting.pop(0)][::-1])
    return LoadFigures(tuple(seconds), refused, len(seconds) / now if now else math.nan)
