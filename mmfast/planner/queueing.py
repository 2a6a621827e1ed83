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
    """Requests under load: seconds of those answered, the number refused, answers a second.

    `ends` are the requests by number, and when each was answered, in the order of `seconds`.
    """

    seconds: tuple[float, ...]
    refused: int
    rate: float
    ends: tuple[tuple[int, float], ...] = ()

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
    coming = [*zip(times, work, range(len(times)), strict=True)][::-1]
    waiting = list[tuple[float, float, int]]()
    left = list[list[float]]()  # seconds of work, arrival and number of what shares the server
    seconds, now, refused = list[float](), 0.0, 0
    ends = list[tuple[int, float]]()
    while coming or left:
        speed = gain[len(left) - 1] / len(left) if left else 1.0
        due = [each[0] / speed for each in left]
        step = max(0.0, min([*due, *(each[0] - now for each in coming[-1:])]))
        now += step
        for each in left:
            each[0] -= step * speed
        over = [each for each in left if each[0] <= 1e-9]
        seconds += [now - came for _, came, _ in over]
        ends += [(int(number), now) for *_, number in over]
        left = [each for each in left if each[0] > 1e-9]
        while coming and coming[-1][0] <= now:
            full = len(left) + len(waiting) >= room
            waiting += [] if full else coming[-1:]
            refused, _ = refused + full, coming.pop()
        while waiting and len(left) < len(gain):
            came, rest, number = waiting.pop(0)
            left.append([rest, came, number])
    rate = len(seconds) / now if now else math.nan
    return LoadFigures(tuple(seconds), refused, rate, tuple(ends))
