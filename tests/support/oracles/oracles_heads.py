"""Slow, obvious versions of the policies whose heads keep unlike numbers: loops over the rule."""

from __future__ import annotations

from collections.abc import Sequence


def adakv(score: Sequence[Sequence[float]], budget: int, alpha: float = 0.2) -> list[list[int]]:
    """Tokens of each head: its own best, then the best of all heads."""
    heads, n = range(len(score)), len(score[0])
    safe = max(int(alpha * budget), 1 if alpha else 0)
    kept: list[list[int]] = []
    for head in heads:
        order = sorted(range(n), key=lambda i: (-score[head][i], i))
        kept.append(order[:safe])
    others = [(-score[h][i], h, i) for h in heads for i in range(n) if i not in kept[h]]
    for _, head, token in sorted(others)[: budget * len(score) - safe * len(score)]:
        kept[head].append(token)
    return [sorted(mine) for mine in kept]


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
