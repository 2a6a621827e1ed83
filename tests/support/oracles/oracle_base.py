"""What the oracles share: an item, an answer, cosines and rankings in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

# Rows whose cosine is this close to 1 count as equal; see the docstring of `max_min`.
SAME = 1 - 2.0**-20


@dataclass
class Item:
    """One item in float64; `attn`, `keys` and `sizes` may be missing."""

    x: np.ndarray  # [N, D]
    attn: np.ndarray | None = None  # [N]
    keys: np.ndarray | None = None  # [N, d]
    sizes: np.ndarray | None = None  # [N]
    grid: tuple[int, int, int] | None = None
    query: np.ndarray | None = None  # [T, D]
    signals: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def n(self) -> int:
        return len(self.x)


@dataclass
class Answer:
    """Outputs as a mapping from the standing source to the weights of its sources."""

    n: int
    groups: dict[int, dict[int, float]] = field(default_factory=dict)
    own_keys: bool = False  # values alone are combined

    @property
    def keep(self) -> list[int]:
        return sorted(self.groups)

    @property
    def matrix(self) -> np.ndarray:
        matrix = np.zeros((len(self.groups), self.n))
        for slot, standing in enumerate(self.keep):
            for source, weight in self.groups[standing].items():
                matrix[slot, source] = weight
        return matrix


def pruned(n: int, keep: list[int]) -> Answer:
    return Answer(n, {token: {token: 1.0} for token in keep})


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else 0.0


def ranked(score: list[float], candidates: list[int] | None = None) -> list[int]:
    """Candidates by descending score, the lower index first on ties."""
    pool = range(len(score)) if candidates is None else candidates
    return sorted(pool, key=lambda i: (-score[i], i))


def apart(x: np.ndarray, count: int) -> list[int]:
    """Picks that are each as far as possible from all picks before; the first is the loneliest."""
    n = len(x)
    alike = [[1.0 if (a == b).all() else cosine(a, b) for b in x] for a in x]
    if n == 1:
        return [0]
    nearest = [max(alike[i][j] for j in range(n) if j != i) for i in range(n)]
    picks = [min(range(n), key=lambda i: (min(nearest[i], SAME), i))]
    while len(picks) < count:
        free = [i for i in range(n) if i not in picks]
        closest = {i: min(max(alike[i][j] for j in picks), SAME) for i in free}
        picks.append(min(free, key=lambda i: (closest[i], i)))
    return picks


def dpc(
    points: list[np.ndarray], count: int, neighbours: int, few: bool = True
) -> dict[int, list[int]]:
    """Centre -> members (centre included), by place; neighbours are `count` at most if `few`."""
    n = len(points)
    far = [
        [math.sqrt(float(((a - b) ** 2).sum())) / math.sqrt(len(a)) for b in points] for a in points
    ]
    near = min(neighbours, count if few else n)
    density = [math.exp(-sum(d * d for d in sorted(row)[:near]) / near) for row in far]
    # Equal points have equal density; a sum in another order must not make one denser.
    density = [round(d, 12) for d in density]
    widest = max(max(row) for row in far)
    reach = [
        min((far[i][j] for j in range(n) if density[j] > density[i]), default=widest)
        for i in range(n)
    ]
    centres = sorted(ranked([d * r for d, r in zip(density, reach, strict=True)])[:count])
    members: dict[int, list[int]] = {c: [c] for c in centres}
    for i in range(n):
        if i not in members:
            members[min(centres, key=lambda c: (far[i][c], c))].append(i)
    return members
