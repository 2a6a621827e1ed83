"""Slow choosers of what a prompt reads, pair by pair in float64.

Each takes queries `[H, G, L, d]`, keys `[H, S, d]`, the scale and settings, and returns a mask
`[H, L, S]` of the pairs of query and key that are computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np


def weights(q: np.ndarray, k: np.ndarray, scale: float, i: int) -> np.ndarray:
    """Attention `[S]` of query i of one head."""
    last = len(k) - len(q) + i
    logits = k[: last + 1] @ q[i] * scale
    found = np.zeros(len(k))
    found[: last + 1] = np.exp(logits - logits.max())
    return found / found.sum()


def mean_weights(q: np.ndarray, k: np.ndarray, scale: float, i: int) -> np.ndarray:
    """The same, mean over the heads of a choice."""
    return sum(weights(head, k, scale, i) for head in q) / len(q)


def smallest(scores: Iterable[float], mass: float) -> list[int]:
    """The fewest indices whose scores reach a sum."""
    scores = list(scores)
    picks: list[int] = []
    total = 0.0
    for index in sorted(range(len(scores)), key=lambda i: (-scores[i], i)):
        if total >= mass or scores[index] <= 0:
            break
        picks.append(index)
        total += scores[index]
    return picks


def best(scores: Iterable[float], count: int) -> list[int]:
    scores = list(scores)
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def pairs(length: int, n: int, size: int, wanted: Callable[[int, int], bool]) -> np.ndarray:
    """Mask `[L, S]`: before its own block a query reads key j where `wanted(block, j)`."""
    mask = np.zeros((length, n), dtype=bool)
    for i in range(length):
        first = i // size * size + n - length
        for j in range(n - length + i + 1):
            mask[i, j] = j >= first or wanted(i // size, j)
    return mask


def spread(length: int, count: int) -> list[int]:
    count = max(1, min(count, length))
    return [(step * length) // count - 1 for step in range(1, count + 1)]


def pooled(
    q: np.ndarray, k: np.ndarray, scale: float, size: int, before: int, own: bool = False
) -> np.ndarray:
    """Shares `[q, k]` by mean queries and mean keys, over blocks that begin before the queries.

    With `own` over the first block that does not, too.
    """
    rows, count = -(-q.shape[1] // size), -(-len(k) // size)
    shares = np.zeros((rows, count))
    means = [k[c * size : (c + 1) * size].mean(0) for c in range(count)]
    for r in range(rows):
        able = [c for c in range(count) if c * size < r * size + before]
        able += [len(able)] if own else []
        for head in q:
            mean = head[r * size : (r + 1) * size].mean(0)
            logits = {c: float(mean @ means[c]) * scale for c in able}
            total = sum(math.exp(x) for x in logits.values())
            for c in able:
                shares[r, c] += math.exp(logits[c]) / total / len(q)
    return shares


def lines(rows: dict[int, np.ndarray], n: int, length: int, size: int) -> list[float]:
    """Attention by distance between the blocks of query and key."""
    found = [0.0] * -(-n // size)
    for i, row in rows.items():
        for j in range(n - length + i + 1):
            found[(n - length + i) // size - j // size] += row[j]
    return found


def sample_attention(
    q: np.ndarray, k: np.ndarray, scale: float, budget: float, size: int, rows: float, window: float
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    before, wide = n - length, round(window * n / size)
    found = []
    for heads, keys in zip(q, k, strict=True):
        sampled = spread(length, round(rows * length))
        outside = np.zeros(n)
        for i in sampled:
            row = mean_weights(heads, keys, scale, i)
            start = ((i // size * size + before) // size - wide) * size
            outside += [row[j] if j < start else 0.0 for j in range(n)]
        outside /= len(sampled)
        columns = set(smallest(outside, budget - (1 - outside.sum())))

        def wanted(r: int, j: int, columns: set[int] = columns) -> bool:
            distance = (r * size + before) // size - j // size
            return j in columns or 0 <= distance <= wide

        found.append(pairs(length, n, size, wanted))
    return np.stack(found)


def zipvl(
    q: np.ndarray, k: np.ndarray, scale: float, budget: float, size: int, probes: int
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    chosen = sorted({*spread(length, probes), *range(max(0, length - probes), length)})
    needs, scores = [], []
    for heads, keys in zip(q, k, strict=True):
        rows = [mean_weights(heads, keys, scale, i) for i in chosen]
        needs += [len(smallest(row, budget)) for row in rows]
        sees = [sum(j <= i + n - length for i in chosen) or 1 for j in range(n)]
        scores.append([sum(row[j] for row in rows) / sees[j] for j in range(n)])
    count = min(n, math.ceil(sum(needs) / len(needs) - 1e-9))
    kept = [set(best(each, count)) for each in scores]
    return np.stack([pairs(length, n, size, lambda r, j, m=mine: j in m) for mine in kept])


def flexprefill(
    q: np.ndarray, k: np.ndarray, scale: float, budget: float, size: int, tau: float
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    before, found = n - length, []
    for heads, keys in zip(q, k, strict=True):
        last = range(max(0, length - size), length)
        rows = {i: mean_weights(heads, keys, scale, i) for i in last}
        true = np.array(
            [sum(row[c : c + size].sum() for row in rows.values()) for c in range(0, n, size)]
        )
        true = true / len(rows)
        means = [keys[c : c + size].mean(0) for c in range(0, n, size)]
        guess = np.zeros(len(means))
        for head in heads:
            exps = np.array(
                [math.exp(float(head[-size:].mean(0) @ mean) * scale) for mean in means]
            )
            guess += exps / exps.sum() / len(heads)
        middle = (true + guess) / 2
        both = [
            sum(x * math.log(x / m) for x, m in zip(p, middle, strict=True) if x > 0)
            for p in (true, guess)
        ]
        if math.sqrt(max(0.0, sum(both) / 2)) < tau:
            shares = pooled(heads, keys, scale, size, before, own=True)
            flat = smallest(shares.flatten(), budget * shares.sum())
            blocks = {(p // shares.shape[1], p % shares.shape[1]) for p in flat}
            blocks = {(r, c) for r, c in blocks if c * size < r * size + before}
            found.append(pairs(length, n, size, lambda r, j, b=blocks: (r, j // size) in b))
            continue
        columns = set(smallest(sum(rows.values()) / len(rows), budget))
        near = set(smallest([x / len(rows) for x in lines(rows, n, length, size)], budget))

        def wanted(r: int, j: int, columns: set[int] = columns, near: set[int] = near) -> bool:
            return j in columns or (r * size + before) // size - j // size in near

        found.append(pairs(length, n, size, wanted))
    return np.stack(found)


def minference(
    q: np.ndarray, k: np.ndarray, scale: float, budget: float, size: int, probes: int
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    before, found = n - length, []
    for heads, keys in zip(q, k, strict=True):
        last = range(max(0, length - probes), length)
        rows = {i: mean_weights(heads, keys, scale, i) for i in last}
        total = max(1, round(budget * -(-n // size)))

        def distance(r: int, j: int) -> int:
            return (r * size + before) // size - j // size

        def near_or_first(r: int, j: int, window: int = total - 1) -> bool:
            return j < size or 0 <= distance(r, j) < window

        ways = [pairs(length, n, size, near_or_first)]
        for part in (0.25, 0.5, 0.75):
            slashes = min(total, max(1, round((1 - part) * total)))
            near = set(best(lines(rows, n, length, size), slashes))
            columns = set(best(sum(rows.values()), (total - slashes) * size))
            ways.append(
                pairs(
                    length, n, size, lambda r, j, c=columns, s=near: j in c or distance(r, j) in s
                )
            )
        shares = pooled(heads, keys, scale, size, before)
        tops = [set(best(row, total)) for row in shares]
        ways.append(pairs(length, n, size, lambda r, j, t=tops: j // size in t[r]))
        kept = [sum(float(row[way[i]].sum()) for i, row in rows.items()) for way in ways]
        found.append(ways[max(range(len(ways)), key=lambda w: (round(kept[w], 5), -w))])
    return np.stack(found)


def pbs(
    q: np.ndarray, k: np.ndarray, scale: float, budget: float, size: int, segment: int
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    wide, count, found = segment * size, -(-n // size), []
    for heads, keys in zip(q, k, strict=True):
        scores = np.zeros(n)
        whole = n // wide * wide  # keys of full segments
        for head in heads:
            for i in range(max(0, length - size), length):
                exps = np.exp(keys[:whole] @ head[i] * scale)
                scores[:whole] += exps / exps.sum()
        order: list[int] = []
        for start in range(0, whole, wide):
            order += sorted(range(start, start + wide), key=lambda j: (-scores[j], j))
        order += range(whole, n)
        place = {j: p for p, j in enumerate(order)}
        means = [keys[order[c * size : (c + 1) * size]].mean(0) for c in range(count)]
        read: dict[int, set[int]] = {}
        for r in range(-(-length // size)):
            mine = (r * size + n - length) // wide
            able = [c for c in range(count) if c // segment < mine]
            shares = np.zeros(count)
            for head in heads if able else ():
                row = head[r * size : (r + 1) * size].mean(0)
                exps = np.array([math.exp(float(row @ means[c]) * scale) for c in able])
                shares[able] += exps / exps.sum() / len(heads)
            read[r] = {*smallest(shares, budget), place[0] // size}
            read[r] |= {c for c in range(count) if c // segment == mine}

        def wanted(r: int, j: int, place: Any = place, read: Any = read) -> bool:
            return place[j] // size in read[r]

        found.append(pairs(length, n, size, wanted))
    return np.stack(found)


def hip(q: np.ndarray, k: np.ndarray, scale: float, budget: float, size: int) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    before, found = n - length, []
    count = max(1, round(budget * -(-n // size)))
    for heads, keys in zip(q, k, strict=True):
        chosen = []
        for r in range(-(-length // size)):
            end = -(-(r * size + before) // size)
            spans = [(c * end // count, (c + 1) * end // count) for c in range(count)]
            spans = [span for span in spans if span[1] > span[0]]
            means = [head[r * size : (r + 1) * size].mean(0) for head in heads]
            while any(high - low > 1 for low, high in spans):
                halves = [(low, (low + high + 1) // 2) for low, high in spans]
                halves += [((low + high + 1) // 2, high) for low, high in spans]
                halves = [half for half in halves if half[1] > half[0]]

                def score(span: tuple[int, int], means: Any = means, keys: Any = keys) -> float:
                    middle = keys[min(n - 1, (span[0] + span[1]) * size // 2)]
                    return max(float(mean @ middle) for mean in means)

                spans = [halves[i] for i in best(map(score, halves), count)]
            chosen.append({low for low, _ in spans} | {0})
        found.append(pairs(length, n, size, lambda r, j, c=chosen: j // size in c[r]))
    return np.stack(found)


def four_bits(row: np.ndarray) -> list[float]:
    """One of the 15 numbers -7 to 7, times a seventh of the largest one, for each number."""
    step = max(abs(float(x)) for x in row) / 7
    return [round(float(x) / step) * step if step else 0.0 for x in row]


def sale(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    budget: float,
    size: int,
    width: int = 32,
    local: int = 128,
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    before, found = n - length, []
    for heads, keys in zip(q, k, strict=True):
        center = keys.mean(0)
        small = np.array([four_bits(key - center) for key in keys])
        read: dict[int, set[int]] = {}
        for r in range(-(-length // size)):
            first = r * size + before
            near = max(0, (first - local) // width * width)
            blocks = {j // width for j in range(first) if j < width or j >= near}
            for head in heads:
                middle = head.mean(0)
                for i in range(r * size, min(length, (r + 1) * size)):
                    exact = keys @ head[i] * scale
                    sure = [j for j in range(before + i + 1) if j < width or j >= near]
                    total = np.exp(exact[sure]).sum()
                    about = small @ np.array(four_bits(head[i] - middle))
                    about += (keys - center) @ middle + head[i] @ center
                    big = np.exp(about * scale) / total >= 1 - budget
                    blocks |= {j // width for j in range(width, near) if big[j]}
            read[r] = blocks
        found.append(pairs(length, n, size, lambda r, j, b=read: j // width in b[r]))
    return np.stack(found)


def cosine(x: np.ndarray, y: np.ndarray) -> float:
    return float(x @ y) / math.sqrt(float(x @ x) * float(y @ y))


def dhsa(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    budget: float,
    size: int,
    chunk: int = 32,
    window: int = 4,
) -> np.ndarray:
    length, n = q.shape[2], k.shape[1]
    before, found = n - length, []
    for heads, keys in zip(q, k, strict=True):
        alike = {
            t: cosine(keys[max(0, t - window) : t].mean(0), keys[t : t + window].mean(0))
            for t in range(1, n)
        }
        dips = [
            t
            for t in alike
            if all(alike[t] <= alike.get(s, 2) for s in range(t - window, t + window + 1))
        ]
        dips.sort(key=lambda t: (alike[t], t))
        cuts = [0, *sorted(dips[: max(0, n // chunk - 1)]), n]
        score = np.zeros((-(-length // size), n))
        for start, stop in itertools.pairwise(cuts):
            stands = keys[start:stop].mean(0) * math.sqrt(stop - start)
            for r in range(len(score)):
                rows = sum(head[r * size : (r + 1) * size].mean(0) for head in heads)
                score[r, start:stop] = rows @ stands
        count, read = round(budget * n), {}
        for r in range(len(score)):
            first = r * size + before
            read[r] = {*best(score[r, :first], count), *range(min(size, first))}
        found.append(pairs(length, n, size, lambda r, j, b=read: j in b[r]))
    return np.stack(found)


ORACLES: dict[str, Callable[..., np.ndarray]] = {
    "sample_attention": sample_attention,
    "zipvl": zipvl,
    "flexprefill": flexprefill,
    "minference": minference,
    "pbs": pbs,
    "hip": hip,
    "sale": sale,
    "dhsa": dhsa,
}


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: np.ndarray) -> Any:
    """Outputs `[H, G, L, d]` over the pairs of a mask `[H, L, S]`."""
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for h, g, i in np.ndindex(*q.shape[:3]):
        seen = np.flatnonzero(mask[h, i])
        logits = k[h, seen] @ q[h, g, i] * scale
        share = np.exp(logits - logits.max())
        out[h, g, i] = share / share.sum() @ v[h, seen]
    return out


def kvcomm(block: Any, asked: Any, anchors: Any) -> dict[str, list[Any]]:
    """Keys and values with the mean offset of anchors `(context, base, now)` of one agent.

    A weight falls by e for every 0.2 that an anchor's embeddings are further away, as a share of
    the larger norm.
    """
    powers = []
    for context, _, _ in anchors:
        here, there = (x.content.double().flatten().tolist() for x in (asked, context))
        sizes = [math.sqrt(sum(x * x for x in each)) for each in (here, there)]
        gap = math.sqrt(sum((a - b) ** 2 for a, b in zip(here, there, strict=True)))
        powers.append(math.exp(-gap / max(sizes) / 0.2))
    shares = [each / sum(powers) for each in powers]
    found: dict[str, list[Any]] = {}
    for name in ("keys", "values"):
        found[name] = []
        for layer, own in enumerate(getattr(block, name)):
            total = own.numpy().copy()
            for share, (_, base, now) in zip(shares, anchors, strict=True):
                was, is_now = (getattr(each, name)[layer].numpy() for each in (base, now))
                total += share * (is_now - was)
            found[name].append(total)
    return found
