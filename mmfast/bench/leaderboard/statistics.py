"""Statistics of the leaderboard: corrected tests, ranks with intervals, fronts, calibration."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
SURE = 0.05  # a corrected p below this tells two results apart
DRAWS = 2000  # resamples behind an interval of ranks
BINS = 10  # of equal width, for the calibration error


def holm(ps: Sequence[float]) -> list[float]:
    """P-values corrected for the number of tests by Holm's step-down method (1979)."""
    found, highest = [0.0] * len(ps), 0.0
    for step, place in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        highest = max(highest, min(1.0, (len(ps) - step) * ps[place]))
        found[place] = highest
    return found


def fisher(right: int, n: int, other_right: int, other_n: int) -> float:
    """Two-sided p of Fisher's exact test (1922): `right` of `n` against `other_right`.

    The sum over all tables with these margins that are no likelier than the one found.
    """
    total, drawn = n + other_n, right + other_right

    def ways(k: int) -> int:
        return math.comb(n, k) * math.comb(other_n, drawn - k)

    seen = ways(right)
    tables = (ways(k) for k in range(max(0, drawn - other_n), min(n, drawn) + 1))
    return float(min(1.0, sum(each for each in tables if each <= seen) / math.comb(total, drawn)))


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Tell of each (cost, value) whether no other point is as cheap and as good, and one better."""
    front, best, cost = [False] * len(points), -math.inf, math.inf
    for place in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        x, y = points[place]
        if y > best or (y == best and x == cost):  # equal points stand together
            front[place], best, cost = True, y, x
    return front


def calibration_error(chances: Sequence[float], right: Sequence[bool]) -> float:
    """Expected calibration error (Naeini and others, 2015) over ten bins of equal width.

    The mean distance between confidence and the share of right answers, weighted by bin.
    """
    said, hits = np.asarray(chances, dtype=float), np.asarray(right, dtype=float)
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    gaps = (abs((said - hits)[bins == each].sum()) for each in range(BINS))
    return float(sum(gaps) / max(1, len(said)))


def ranks(scores: NDArray[np.floating]) -> NDArray[np.floating]:
    """Ranks `[..., M]` of scores `[..., M]`, 1 for the highest; equal ones share their mean."""
    mine, others = scores[..., :, None], scores[..., None, :]
    found: NDArray[np.floating] = 0.5 + (others > mine).sum(-1) + 0.5 * (others == mine).sum(-1)
    return found


def rank_intervals(marks: Flags, seed: int = 0) -> list[tuple[float, float, float]]:
    """Rank of each method and its 95 % interval by resampling the questions.

    Args:
        marks: Whether method m answered question q rightly, `[M, Q]`: the same questions to all.
        seed: Seed of the draws.

    Returns:
        For each method (rank, low, high).
    """
    methods, n = marks.shape
    right = marks.astype(np.int32)
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), DRAWS)  # [draws, Q]
    drawn = ranks((weights @ right.T).astype(float))
    low, high = np.percentile(drawn, [2.5, 97.5], axis=0)
    whole = ranks(right.sum(-1).astype(float))
    return [(float(whole[m]), float(low[m]), float(high[m])) for m in range(methods)]


def newcombe(right: int, n: int, other_right: int, other_n: int) -> tuple[float, float]:
    """95 % interval of the difference of two independent shares (Newcombe 1998, method 10).

    The difference is that of the second share to the first.
    """
    from mmfast.tiny.evaluate import interval

    first, second = right / n, other_right / other_n
    (low, high), (other_low, other_high) = interval(right, n), interval(other_right, other_n)
    down = math.hypot(second - other_low, high - first)
    up = math.hypot(other_high - second, first - low)
    return second - first - down, second - first + up
