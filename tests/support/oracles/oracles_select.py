"""Choices at one decode step once more: slow, obvious, in float64, one head after the other."""

from __future__ import annotations

import math

import numpy as np


def tokens_of(budget: int | float, n: int) -> int:
    return max(1, round(budget * n)) if isinstance(budget, float) else budget


def bound(query: np.ndarray, keys: np.ndarray) -> float:
    """Largest product that a key between the extremes of `[page, d]` can have with the query."""
    total = 0.0
    for channel in range(len(query)):
        numbers = [float(key[channel]) for key in keys]
        total += max(query[channel] * min(numbers), query[channel] * max(numbers))
    return total


def group_of(queries: np.ndarray, head: int, heads: int) -> np.ndarray:
    """The query heads of `[Hq, d]` that share a key head."""
    size = len(queries) // heads
    return queries[head * size : (head + 1) * size]


def best_pages(
    queries: np.ndarray, keys: np.ndarray, wanted: int, page: int, stays: set[int]
) -> list[int]:
    """Numbers of the pages of one head; those with an entry that stays come on top."""
    count = (len(keys) - 1) // page
    parts = [keys[i * page : (i + 1) * page] for i in range(count)]
    score = [sum(bound(q, part) for q in queries) / len(queries) for part in parts]
    forced = {place // page for place in stays if place < count * page}
    rest = sorted((i for i in range(count) if i not in forced), key=lambda i: -score[i])
    return sorted(forced | set(rest[:wanted]))


def quest(
    queries: np.ndarray,
    keys: np.ndarray,
    budget: int | float,
    page: int = 16,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[set[int]]:
    """Places that each head of keys `[H, n, d]` reads for queries `[Hq, d]`."""
    heads, n, _ = keys.shape
    count, wanted = (n - 1) // page, max(1, round(tokens_of(budget, n) / page))
    if wanted >= count:
        return [set(range(n))] * heads
    found = []
    for head in range(heads):
        pages = best_pages(group_of(queries, head, heads), keys[head], wanted, page, stays)
        read = {i * page + j for i in pages for j in range(page)}
        found.append(read | set(range(count * page, n)))
    return found


def kinetics(
    queries: np.ndarray,
    keys: np.ndarray,
    budget: int | float,
    page: int = 16,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[set[int]]:
    """Add pages while all that a head reads, and the search in halves of an entry, are paid."""
    heads, n, width = keys.shape
    count, cost, found = (n - 1) // page, tokens_of(budget, n), []
    if cost >= n or count < 2:
        return [set(range(n))] * heads
    for head in range(heads):
        score = []
        for start in range(0, count * page, page):
            mean = [
                float(sum(keys[head, start + j, c] for j in range(page))) / page
                for c in range(width)
            ]
            mine = group_of(queries, head, heads)
            score.append(sum(float(q @ np.array(mean)) for q in mine) / len(mine))
        falling = sorted(range(count), key=lambda i: -score[i])
        forced = {place // page for place in stays if place < count * page}
        read, searched = set(range(count * page, n)), count * 0.5
        order = [i for i in falling if i in forced] + [i for i in falling if i not in forced]
        for number, i in enumerate(order):
            if number < max(1, len(forced)) or len(read) + page + searched <= cost:
                read |= set(range(i * page, (i + 1) * page))
        found.append(read)
    return found


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return [w / sum(weights) for w in weights]


def attention(queries: np.ndarray, keys: np.ndarray, scale: float) -> list[list[float]]:
    """Attention of each query to all keys `[n, d]`."""
    return [softmax([float(q @ k) * scale for k in keys]) for q in queries]


def most(votes: list[float], wanted: int, stays: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
    """The most voted of all but the last place, which is read anyway; others on top."""
    rest = [i for i in range(len(votes) - 1) if i not in stays]
    best = sorted(rest, key=lambda i: -votes[i])[:wanted]
    return set(best) | {len(votes) - 1} | set(stays)


def votes_of_all(queries: np.ndarray, keys: np.ndarray, scale: float) -> list[float]:
    """Attention to each place, added over all query heads."""
    heads = len(keys)
    rows = [
        row for h in range(heads) for row in attention(group_of(queries, h, heads), keys[h], scale)
    ]
    return [sum(row[i] for row in rows) for i in range(keys.shape[1])]


def tokenselect(
    queries: np.ndarray,
    keys: np.ndarray,
    wanted: int,
    scale: float,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> set[int]:
    """Choice of all heads together; each has one vote for what is not read anyway."""
    n = keys.shape[1]
    open_to = [i for i in range(n - 1) if i not in stays]
    votes = [0.0] * n
    if open_to:
        for i, vote in zip(open_to, votes_of_all(queries, keys[:, open_to], scale), strict=True):
            votes[i] = vote
    return most(votes, wanted, stays)


def cosine(one: np.ndarray, other: np.ndarray) -> float:
    a, b = one.flatten(), other.flatten()
    return float(a @ b / math.sqrt(float(a @ a) * float(b @ b)))


def tidaldecode(queries: np.ndarray, keys: np.ndarray, wanted: int, scale: float) -> list[set[int]]:
    """TidalDecode's choice: in every head the most attention, mean over its query heads."""
    heads = len(keys)
    rows = [attention(group_of(queries, h, heads), keys[h], scale) for h in range(heads)]
    means = [[sum(column) / len(mine) for column in zip(*mine, strict=True)] for mine in rows]
    return [most(mean, wanted) for mean in means]


def few_bits(keys: np.ndarray, bits: int = 4) -> np.ndarray:
    """A page `[page, d]` with each channel at one of 2^bits even levels between its extremes."""
    out, most = np.array(keys, dtype=np.float64), 2**bits - 1
    for channel in range(keys.shape[1]):
        low, high = keys[:, channel].min(), keys[:, channel].max()
        for i, x in enumerate(keys[:, channel]):
            level = 0 if high == low else round((x - low) / (high - low) * most)
            out[i, channel] = low + level * (high - low) / most
    return out


def cover(weights: list[float], share: float) -> set[int]:
    """The heaviest, until they hold the share."""
    chosen: set[int] = set()
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if sum(weights[j] for j in chosen) >= share * sum(weights):
            break
        chosen.add(i)
    return chosen


def twilight(
    queries: np.ndarray, keys: np.ndarray, share: float, base: float, page: int, scale: float
) -> list[set[int]]:
    """Candidates by page, then the fewest that hold the share for each query head."""
    heads, n, _ = keys.shape
    count = (n - 1) // page
    if not count:
        return [set(range(n))] * heads
    wanted, found = min(count, max(1, round(max(1, round(base * n)) / page))), []
    for head in range(heads):
        mine, queried = keys[head], group_of(queries, head, heads)
        pages = best_pages(queried, mine, wanted, page, set())
        rough = [row for i in pages for row in few_bits(mine[i * page : (i + 1) * page])]
        places = [i * page + j for i in pages for j in range(page)]
        tail = list(range(count * page, n))
        read = set(tail)
        for row in attention(queried, np.array([*rough, *mine[count * page :]]), scale):
            read |= {[*places, *tail][i] for i in cover(row, share)}
        found.append(read)
    return found


def specache(
    queries: np.ndarray,
    keys: np.ndarray,
    scale: float,
    budget: int | float,
    bits: int = 2,
    group: int = 64,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[set[int]]:
    """Places that queries `[Hq, d]` send for, by a copy of all full groups of keys `[H, n, d]`."""
    heads, n, _ = keys.shape
    count, wanted, found = (n - 1) // group * group, tokens_of(budget, n), []
    if wanted >= count:
        return [set(range(n))] * heads
    for head in range(heads):
        starts = range(0, count, group)
        copy = [row for i in starts for row in few_bits(keys[head, i : i + group], bits)]
        rows = attention(group_of(queries, head, heads), np.array(copy), scale)
        means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
        forced = {place for place in stays if place < count}
        rest = sorted((i for i in range(count) if i not in forced), key=lambda i: -means[i])
        found.append(forced | set(rest[:wanted]) | set(range(count, n)))
    return found


def slimfer(
    queries: np.ndarray,
    keys: np.ndarray,
    scale: float,
    budget: int | float,
    block: int = 16,
    unit: int = 4,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[set[int]]:
    """Places that all heads of keys `[H, n, d]` read for queries `[Hq, d]`: those of blocks."""
    heads, n, _ = keys.shape
    count, wanted = (n - 1) // block, max(1, round(tokens_of(budget, n) / block))
    if wanted >= count:
        return [set(range(n))] * heads
    votes = [0.0] * (count * block // unit)
    for head in range(heads):
        units = [keys[head, i : i + unit].sum(0) / unit for i in range(0, count * block, unit)]
        for row in attention(group_of(queries, head, heads), np.array(units), scale):
            votes = [vote + share for vote, share in zip(votes, row, strict=True)]
    size = block // unit
    best = [max(votes[i * size : (i + 1) * size]) for i in range(count)]
    forced = {place // block for place in stays if place < count * block}
    rest = sorted((i for i in range(count) if i not in forced), key=lambda i: -best[i])
    chosen = forced | set(rest[:wanted])
    places = {i * block + j for i in chosen for j in range(block)} | set(range(count * block, n))
    return [places] * heads


def sentences(ids: list[int], ends: set[int], frames: list[int] | None = None) -> list[int]:
    """Number of the sentence of each token; a frame is one, and -1 is text."""
    numbers, frames = [], frames or [-1] * len(ids)
    for i in range(len(ids)):
        over = i and (frames[i] != frames[i - 1] or (frames[i - 1] < 0 and ids[i - 1] in ends))
        numbers.append(0 if not i else numbers[-1] + bool(over))
    return numbers


def sentencekv(
    asked: list[np.ndarray],
    keys: np.ndarray,
    numbers: list[int],
    budget: int | float,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[set[int]]:
    """Places that each head reads; `asked` are the queries `[Hq, d]` of the sentence so far."""
    heads, n, width = keys.shape
    wanted, now, found = tokens_of(budget, n), numbers[-1], []
    if wanted >= n - 1 or now < 1:
        return [set(range(n))] * heads
    parts = [[i for i in range(n) if numbers[i] == s] for s in range(now)]
    for head in range(heads):
        mine = [q for queries in asked for q in group_of(queries, head, heads)]
        query = [sum(q[c] for q in mine) / len(mine) for c in range(width)]
        score = []
        for part in parts:
            mean = [sum(keys[head, i, c] for i in part) / max(1, len(part)) for c in range(width)]
            score.append(sum(a * b for a, b in zip(query, mean, strict=True)) if part else -1e30)
        read, room = {i for i in range(n) if numbers[i] == now} | set(stays), wanted
        for rank, s in enumerate(sorted(range(now), key=lambda s: -score[s])):
            room -= len(parts[s])
            if rank and room < 0:
                break
            read |= set(parts[s])
        found.append(read)
    return found


def dstp(
    asked: list[np.ndarray],
    keys: np.ndarray,
    visual: set[int],
    scale: float,
    budget: int | float,
    similar: float = 0.7,
    hold: int = 8,
    stays: set[int] = frozenset(),  # type: ignore[assignment]
) -> list[set[int]]:
    """Places that the last of consecutive queries `[Hq, d]` reads; the first begins an answer."""
    heads, n, _ = keys.shape
    wanted, left = tokens_of(budget, len(visual)), 0
    if wanted >= len(visual):
        return [set(range(n))] * heads

    def within(queries: np.ndarray, head: int, places: set[int]) -> dict[int, float]:
        order = sorted(places)
        rows = attention(group_of(queries, head, heads), keys[head, order], scale)
        return {i: sum(row[at] for row in rows) / len(rows) for at, i in enumerate(order)}

    def best(score: dict[int, float]) -> set[int]:
        return set(sorted(score, key=lambda i: -score[i])[:wanted])

    kept = [best(within(asked[0], head, visual)) for head in range(heads)]
    began = [within(asked[0], head, kept[head]) for head in range(heads)]
    more: list[set[int]] = [set()] * heads
    for queries in asked[1:]:
        if left:
            left -= 1
            continue
        more = [set()] * heads
        now = [within(queries, head, kept[head]) for head in range(heads)]
        pair = [
            np.array([share for mine in each for _, share in sorted(mine.items())])
            for each in (now, began)
        ]
        if cosine(*pair) < similar:
            for head in range(heads):
                others = within(queries, head, visual - kept[head])
                more[head] = best({**now[head], **others}) - kept[head]
            left = hold - 1
    return [(set(range(n)) - visual) | kept[h] | more[h] | set(stays) for h in range(heads)]
