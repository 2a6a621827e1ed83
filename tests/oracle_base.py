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
