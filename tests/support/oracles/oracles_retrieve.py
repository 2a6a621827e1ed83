"""Retrieval of stored keys once more: slow, obvious, in float64, one number at a time."""

from __future__ import annotations

import math

import numpy as np


def mean_key(keys: np.ndarray) -> list[float]:
    """Heads side by side: the mean over tokens of `[H, n, d]`."""
    heads, n, width = keys.shape
    return [
        sum(float(keys[h, i, c]) for i in range(n)) / n for h in range(heads) for c in range(width)
    ]


def question(query: np.ndarray, heads: int) -> list[float]:
    """The mean query over tokens of `[Hq, T, d]`; the heads of a group add up."""
    total, tokens, width = query.shape
    out = [0.0] * (heads * width)
    for head in range(total):
        key_head = head // (total // heads)
        for token in range(tokens):
            for channel in range(width):
                out[key_head * width + channel] += float(query[head, token, channel]) / tokens
    return out


def rekv(
    blocks: dict[int, np.ndarray], query: np.ndarray, budget: int, chunk: int = 1
) -> list[int]:
    """Numbers of the blocks that are read, ascending."""
    wanted = question(query, next(iter(blocks.values())).shape[0])
    score = {
        number: sum(a * b for a, b in zip(mean_key(keys), wanted, strict=True))
        for number, keys in blocks.items()
    }
    numbers = sorted(score)
    if len(numbers) <= budget:
        return numbers
    groups = [numbers[i : i + chunk] for i in range(0, len(numbers), chunk)]
    ranked = sorted(groups, key=lambda g: -sum(score[b] for b in g) / len(g))
    return sorted(number for group in ranked[: max(1, budget // chunk)] for number in group)


def hash_bits(keys: np.ndarray, planes: np.ndarray) -> list[list[bool]]:
    """The side of each hyperplane (a column of `planes`) that each token's key lies on."""
    heads, n = keys.shape[:2]
    rows = []
    for token in range(n):
        row = np.concatenate([keys[h, token] for h in range(heads)])
        rows.append([float(row @ planes[:, p]) > 0 for p in range(planes.shape[1])])
    return rows


def clusters(bits: list[list[bool]], radius: int) -> list[list[int]]:
    """One token after the other: join the nearest founder that is near enough, or found."""
    found: list[list[int]] = []
    for token, row in enumerate(bits):
        best, where = radius, None
        for number, members in enumerate(found):
            apart = sum(a != b for a, b in zip(row, bits[members[0]], strict=True))
            if apart < best:
                best, where = apart, number
        if where is None:
            found.append([token])
        else:
            found[where].append(token)
    return found


def mass(query: np.ndarray, means: list[np.ndarray], counts: list[int]) -> list[list[float]]:
    """Attention of each token of `[Hq, T, d]` on clusters with means `[H, d]`, mean over heads."""
    total, tokens, width = query.shape
    rows = []
    for token in range(tokens):
        row = [0.0] * len(means)
        for head in range(total):
            key_head = head // (total // means[0].shape[0])
            scores = [float(query[head, token] @ m[key_head]) / math.sqrt(width) for m in means]
            top = max(scores)
            weights = [math.exp(s - top) * c for s, c in zip(scores, counts, strict=True)]
            for i, weight in enumerate(weights):
                row[i] += weight / sum(weights) / total
        rows.append(row)
    return rows


def cover(row: list[float], share: float) -> set[int]:
    """The heaviest entries, until they hold the share."""
    chosen: set[int] = set()
    held = 0.0
    for i in sorted(range(len(row)), key=lambda i: -row[i]):
        if held >= share * sum(row):
            break
        chosen.add(i)
        held += row[i]
    return chosen


def resv(
    blocks: dict[int, np.ndarray], query: np.ndarray, share: float, radius: int, planes: np.ndarray
) -> dict[int, list[int]]:
    """Tokens that are read of each block."""
    parts = [
        (number, members)
        for number, keys in sorted(blocks.items())
        for members in clusters(hash_bits(keys, planes), radius)
    ]
    means = [blocks[number][:, members].mean(1) for number, members in parts]
    rows = mass(query, means, [len(members) for _, members in parts])
    chosen = set().union(*(cover(row, share) for row in rows))
    out: dict[int, list[int]] = {}
    for i in sorted(chosen):
        number, members = parts[i]
        out[number] = sorted(out.get(number, []) + members)
    return out


def grouped_rekv(
    blocks: dict[int, np.ndarray], query: np.ndarray, budget: int, group: int, look: int
) -> list[int]:
    """Numbers of the blocks that are read of the best groups of successive numbers."""
    wanted = question(query, next(iter(blocks.values())).shape[0])
    means = {number: mean_key(keys) for number, keys in blocks.items()}
    groups: dict[int, list[int]] = {}
    for number in sorted(blocks):
        groups.setdefault(number // group, []).append(number)

    def score(members: list[int]) -> float:
        mean = [
            sum(column) / len(members) for column in zip(*(means[m] for m in members), strict=True)
        ]
        return sum(a * b for a, b in zip(mean, wanted, strict=True))

    best = sorted(groups, key=lambda g: -score(groups[g]))[:look]
    inside = {number: blocks[number] for g in best for number in groups[g]}
    return rekv(inside, query, budget)
