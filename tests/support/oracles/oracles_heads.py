"""Slow, obvious versions of the policies whose heads keep unlike numbers: loops over the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def adakv(
    score: Sequence[Sequence[float]], budget: int, alpha: float = 0.2, guard: str = "blend"
) -> list[list[int]]:
    """Tokens of each head: its own best, then the best of all heads; or the two mixed."""
    heads, n = range(len(score)), len(score[0])
    if guard == "blend":
        best = sorted((-score[h][i], h, i) for h in heads for i in range(n))
        share = Fraction(alpha).limit_denominator(1000)
        given = [
            (1 - share) * sum(h == head for _, h, _ in best[: budget * len(score)]) + share * budget
            for head in heads
        ]
        counts = _wholes(given, budget * len(score), 1 if alpha else 0)
        ranked = [sorted(range(n), key=lambda i, h=h: (-score[h][i], i)) for h in heads]
        return [sorted(ranked[h][: counts[h]]) for h in heads]
    safe = max(int(alpha * budget), 1 if alpha else 0)
    kept: list[list[int]] = []
    for head in heads:
        order = sorted(range(n), key=lambda i: (-score[head][i], i))
        kept.append(order[:safe])
    others = [(-score[h][i], h, i) for h in heads for i in range(n) if i not in kept[h]]
    for _, head, token in sorted(others)[: budget * len(score) - safe * len(score)]:
        kept[head].append(token)
    return [sorted(mine) for mine in kept]


def _wholes(given: list[Fraction], total: int, least: int) -> list[int]:
    """Whole numbers of a sum, each at least so many, the largest rests rounded up."""
    over = [max(g - least, Fraction(0)) for g in given]
    left = total - least * len(given)
    quota = [o * left / sum(over) if sum(over) else Fraction(left, len(over)) for o in over]
    counts = [math.floor(q) for q in quota]
    first = sorted(range(len(quota)), key=lambda h: (counts[h] - quota[h], h))
    for head in first[: left - sum(counts)]:
        counts[head] += 1
    return [least + c for c in counts]


def duo_attention(
    reach: Sequence[Sequence[float]], n: int, retrieval: float, sink: int, recent: int
) -> list[list[list[int]]]:
    """Tokens of each head of each layer: everything where it retrieves most, else both ends."""
    all_heads = sorted(
        ((-x, layer, head) for layer, row in enumerate(reach) for head, x in enumerate(row))
    )
    count = int(retrieval * len(all_heads) + 1e-9)
    wide = {(layer, head) for _, layer, head in all_heads[:count]}
    ends = [i for i in range(n) if i < sink or i >= n - recent]
    return [
        [list(range(n)) if (layer, head) in wide else ends for head in range(len(row))]
        for layer, row in enumerate(reach)
    ]
