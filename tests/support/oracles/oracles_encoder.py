"""Oracles of methods with golden vectors of their authors' code; see oracles.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
from oracle_base import SAME, Answer, Item, cosine, pruned, ranked


def even(value: float) -> float:
    """A score without its last bits: equal tokens tie, whatever order their sums were taken in."""
    return value if math.isinf(value) else round(value, 9)


def shared(weights: list[float], budget: int, caps: list[int]) -> list[int]:
    """Largest remainder, what does not fit handed on."""
    full = {g for g, cap in enumerate(caps) if cap == 0}
    while True:
        free = [g for g in range(len(caps)) if g not in full]
        left = budget - sum(caps[g] for g in full)
        total = sum(weights[g] for g in free)
        part = {g: left * (weights[g] / total if total else 1 / len(free)) for g in free}
        over = {g for g in free if part[g] >= caps[g] - 1e-9}
        if not over:
            break
        full |= over
    counts = [caps[g] if g in full else math.floor(part[g] + 1e-9) for g in range(len(caps))]
    free.sort(key=lambda g: (-even(part[g] - counts[g]), g))
    for g in free[: budget - sum(counts)]:
        counts[g] += 1
    return counts


def by_frame(item: Item, score: list[float], counts: list[int]) -> Answer:
    """The highest scores of each frame."""
    n = item.n // len(counts)
    keep: list[int] = []
    for frame, count in enumerate(counts):
        keep += ranked(score, list(range(frame * n, (frame + 1) * n)))[:count]
    return pruned(item.n, keep)


def hiprune(item: Item, budget: int, alpha: float = 0.1) -> Answer:
    middle, deep = item.signals["attn_middle"].tolist(), item.signals["attn_visual"].tolist()
    _, rows, columns = item.grid or (1, 1, item.n)
    chosen: set[int] = set()
    for anchor in ranked(middle)[: min(round(budget * alpha / 5), budget // 5)]:
        frame, (y, x) = anchor // (rows * columns), divmod(anchor % (rows * columns), columns)
        for down, right in ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0)):
            if 0 <= y + down < rows and 0 <= x + right < columns:
                chosen.add((frame * rows + y + down) * columns + x + right)
    others = ranked(deep, [i for i in range(item.n) if i not in chosen])
    return pruned(item.n, sorted(chosen) + others[: budget - len(chosen)])


def hired(item: Item, budget: int, alpha: float = 0.5) -> Answer:
    late, first = item.attn.tolist(), item.signals["attn_first"].tolist()
    tile = [int(t) for t in item.signals.get("tile", np.zeros(item.n))]
    members = {t: [i for i in range(item.n) if tile[i] == t] for t in sorted({0, *tile})}
    overview, crops = members[0], [t for t in members if t]
    if not crops:
        return pruned(item.n, ranked(late)[:budget])
    whole = min(math.ceil(budget * alpha), len(overview))
    rest = min(budget - whole, item.n - len(overview))
    cover = covering(item, overview, {t: members[t] for t in crops})
    salient = ranked(first, overview)[: int(len(overview) * (1 - alpha))]
    weights = [float(sum(cover[i] == t for i in salient)) for t in crops]
    if not overview:
        weights = [float(len(members[t])) for t in crops]
    counts = shared(weights, rest, [len(members[t]) for t in crops])
    keep = ranked(late, overview)[: budget - rest]
    for t, count in zip(crops, counts, strict=True):
        keep += ranked(late, members[t])[:count]
    return pruned(item.n, keep)


def covering(item: Item, overview: list[int], crops: dict[int, list[int]]) -> dict[int, int]:
    """The crop that shows what an overview token shows."""
    place = item.signals.get("place")
    strips = {i: list(crops)[k * len(crops) // len(overview)] for k, i in enumerate(overview)}
    if place is None:
        return strips
    cells = {  # every cell of the rectangle that a crop spans
        t: {
            (y, x)
            for y in range(int(min(place[m, 1])), int(max(place[m, 1])) + 1)
            for x in range(int(min(place[m, 2])), int(max(place[m, 2])) + 1)
        }
        for t, m in crops.items()
    }
    every = [cell for owned in cells.values() for cell in owned]
    if len(every) != len(set(every)):
        return strips
    found: dict[int, int] = {}
    for i in overview:
        spot = []
        for axis in (0, 1):
            own = [int(place[j, axis + 1]) for j in overview]
            low, high = min(c[axis] for c in every), max(c[axis] for c in every) + 1
            part = Fraction(
                2 * (int(place[i, axis + 1]) - min(own)) + 1, 2 * (max(own) - min(own) + 1)
            )
            spot.append(math.floor(low + part * (high - low)))
        found[i] = next((t for t, owned in cells.items() if tuple(spot) in owned), -1)
    return found


def merged_neighbours(item: Item, listed: list[int], neighbours: int = 32) -> Answer:
    rest = [i for i in range(item.n) if i not in listed]
    if len(rest) == 1:  # with all tokens there is nothing to sum up
        return pruned(item.n, listed + rest)
    answer = Answer(item.n)
    for i in listed:
        alike = [even(cosine(item.keys[i], item.keys[j])) for j in range(item.n)]
        near = [j for j in ranked(alike) if j != i][:neighbours]
        total = 1 + sum(item.attn[j] for j in near)
        answer.groups[i] = {j: item.attn[j] / total for j in near} | {i: 1 / total}
    total = sum(item.attn[j] for j in rest)
    share = {j: item.attn[j] / total if total else 1 / len(rest) for j in rest}
    answer.groups[ranked(item.attn.tolist(), rest)[0]] = share
    return answer


def outliers(attn: np.ndarray) -> int:
    first, third = np.percentile(attn, [25, 75])
    return int((attn > third + 1.5 * (third - first)).sum())


def prumerge(item: Item, budget: int | None, neighbours: int = 32) -> Answer:
    count = outliers(item.attn) if budget is None else budget - 1
    return merged_neighbours(item, ranked(item.attn.tolist())[:count], neighbours)


def prumerge_plus(item: Item, budget: int | None, spatial: float = 0.75) -> Answer:
    order = ranked(item.attn.tolist())
    if budget is None:
        count = max(outliers(item.attn), 1)
        stride = max(1, item.n // count // 3)
        listed = order[:count]
        listed += [i for i in range(0, item.n, stride) if i not in listed]
        return merged_neighbours(item, listed[: item.n - 1])
    samples = round(spatial * (budget - 1))
    listed = order[: budget - 1 - samples]
    free = [i for i in range(item.n) if i not in listed]
    run = Fraction(len(free), max(samples, 1))
    return merged_neighbours(item, listed + [free[int(run * k + run / 2)] for k in range(samples)])


def dycoke(item: Item, budget: int | None, ratio: float = 0.7) -> Answer:
    frames, rows, columns = item.grid or (1, 1, item.n)
    n = rows * columns
    against = {0: 4, 1: 1, 2: 2, 3: 1}
    change = [math.inf]
    for i in range(1, item.n):
        if i < n:  # the first frame has nothing before it in time
            others = ([i - 1] if i % columns else []) + ([i - columns] if i >= columns else [])
        else:
            others = [i - n * against[i // n % 4]]
        change.append(even(1 - max(cosine(item.x[i], item.x[j]) for j in others)))
    whole = [frame % 4 == 0 for frame in range(frames)]
    counts = [n if w else int((1 - ratio) * n) for w in whole]
    if budget is not None:
        counts = shared([1.0 if w else 1 - ratio for w in whole], budget, [n] * frames)
    return by_frame(item, change, counts)


def steady(item: Item) -> np.ndarray:
    """Half of the channels, the steadiest, in order."""
    spread = [
        0.0 if np.ptp(item.x[:, c]) == 0 else float(np.var(item.x[:, c]))
        for c in range(item.x.shape[1])
    ]
    order = sorted(range(len(spread)), key=lambda c: (spread[c], c))
    return item.x[:, order[: max(1, len(order) // 2)]]


def unit(row: np.ndarray) -> np.ndarray:
    length = math.sqrt(float(row @ row))
    return row / length if length else row


def kernel(a: np.ndarray, b: np.ndarray) -> float:
    square = float(((a - b) ** 2).sum())
    return sum(math.exp(-square / (2 * width)) for width in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def stc_pruner(item: Item, budget: int) -> Answer:
    frames = item.grid[0] if item.grid else 1
    rows = steady(item)
    memory = unit(rows.mean(0))
    tokens = np.array([unit(row) for row in rows])
    middle = np.repeat(tokens.reshape(frames, -1, rows.shape[1]).mean(1), item.n // frames, 0)
    score = [
        even(-kernel(row, memory) - kernel(row, centre))
        for row, centre in zip(tokens, middle, strict=True)
    ]
    return by_frame(item, score, shared([1.0] * frames, budget, [item.n // frames] * frames))


def vidcom2(item: Item, budget: int | None, ratio: float = 0.25) -> Answer:
    frames = item.grid[0] if item.grid else 1
    n = item.n // frames
    tokens = np.array([unit(row) for row in steady(item)])
    video = tokens.mean(0)
    score, apart = [], []
    for frame in tokens.reshape(frames, n, -1):
        near = [kernel(row, video) for row in frame]
        apart.append(-sum(near) / n)
        score += [even(-a - kernel(row, frame.mean(0))) for a, row in zip(near, frame, strict=True)]
    raised = [math.exp((even(a) - max(even(b) for b in apart)) / 0.01) for a in apart]
    weights = [1 + r / sum(raised) - 1 / frames for r in raised]
    counts = [max(1, round(min(1, ratio * w) * n)) for w in weights]
    if budget is not None:
        counts = shared(weights, budget, [n] * frames)
    return by_frame(item, score, counts)


def cdpruner(item: Item, budget: int, opposite: bool = False) -> Answer:
    """Relevance times likeness as the kernel of a determinantal point process."""
    n = item.n
    near = [even(float(np.mean([cosine(row, word) for word in item.query]))) for row in item.x]
    near = [-value for value in near] if opposite else near
    low, high = min(near), max(near)
    relevance = [(v - low + 1e-6) / (high - low) if high > low else 1.0 for v in near]
    return pruned(n, dpp(item.x, relevance, budget))


def dpp(x: np.ndarray, quality: list[float], budget: int) -> list[int]:
    """Every pick maximises the determinant of quality times cosine; then the rest by quality."""
    n = len(x)
    alike = np.array([[cosine(a, b) for b in x] for a in x])
    picks: list[int] = []
    while len(picks) < budget:
        gain = {}
        for i in set(range(n)) - set(picks):
            inside = alike[np.ix_(picks, picks)]
            across = alike[i, picks]
            apart = alike[i, i] - across @ np.linalg.pinv(inside, rcond=1e-9) @ across
            if apart > 1e-8:
                gain[i] = apart * quality[i] ** 2
        if not gain:
            break
        best = max(gain.values())
        picks.append(min(i for i, value in gain.items() if value >= best * SAME))
    left = [i for i in range(n) if i not in picks]
    rest = ranked([even(q) for q in quality], left)
    return picks + rest[: budget - len(picks)]


DISTANCES: Mapping[str, Callable[[np.ndarray], float]] = {
    "exact": lambda d: float(np.abs(d).max()),
    "max": lambda d: float(np.abs(d).max()),
    "mae": lambda d: float(np.abs(d).mean()),
    "rmse": lambda d: float(np.sqrt((d**2).mean())),
}


def pixelprune(
    item: Item,
    budget: int | None,
    threshold: float = 0.0,
    metric: str = "max",
    anchored: bool = True,
) -> Answer:
    _, rows, columns = item.grid
    pixels, far = item.signals["pixels"], DISTANCES[metric]
    seen = pixels.copy()
    keep, wonder = [], []
    for i in range(item.n):
        y, x = i // columns % rows, i % columns
        if not x and not y:
            keep.append(i)
            wonder.append(math.inf)
            continue
        a, b, c = i - 1, i - columns, i - columns - 1
        if budget is not None:
            upper = y and x and far(pixels[c] - pixels[a]) < far(pixels[c] - pixels[b])
            wonder.append(far(pixels[i] - pixels[b if not x or upper else a]))
            continue
        source = seen if anchored else pixels
        upper = y and x and far(source[c] - source[a]) <= threshold < far(source[c] - source[b])
        guess = source[b if not x or upper else a]
        if far(pixels[i] - guess) > threshold:
            keep.append(i)
        else:
            seen[i] = guess
    return pruned(item.n, keep if budget is None else ranked([even(w) for w in wonder])[:budget])


ORACLES: Mapping[str, Callable[..., Answer]] = {
    "cdpruner": cdpruner,
    "dycoke": dycoke,
    "hiprune": hiprune,
    "hired": hired,
    "pixelprune": pixelprune,
    "prumerge": prumerge,
    "prumerge_plus": prumerge_plus,
    "stc_pruner": stc_pruner,
    "vidcom2": vidcom2,
}
