"""Oracles of methods made of scores, selectors, leftovers and budgets; see oracles.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
from oracle_base import Answer, Item, apart, cosine, dpc, pruned, ranked
from oracles_encoder import dpp, shared

STEP = 2.0**-30


def snap(value: float) -> float:
    """Scores count in steps of 2^-30, so that equal tokens tie."""
    return round(value / STEP) * STEP


def alike(a: np.ndarray, b: np.ndarray) -> float:
    return snap(cosine(a, b))


def rescaled(score: list[float]) -> list[float]:
    low, high = min(score), max(score)
    return [snap((s - low) / (high - low)) if high > low else 0.0 for s in score]


def relevance(x: np.ndarray, query: np.ndarray) -> list[float]:
    """Cosine with the best word, each word less its mean over the tokens."""
    best = [-math.inf] * len(x)
    for word in query:
        column = [alike(token, word) for token in x]
        mean = sum(column) / len(column)
        best = [max(b, snap(c - mean)) for b, c in zip(best, column, strict=True)]
    return best


def trade_off(
    score: list[float], x: np.ndarray, count: int, balance: float, start: list[int]
) -> list[int]:
    """Picks of the best score less the likeness to the picks before."""
    near = [[alike(a, b) for b in x] for a in x]
    picks = list(start)
    while len(picks) < count:
        worth = {}
        for i in range(len(x)):
            if i not in picks:
                likeness = max((near[i][p] for p in picks), default=-1.0)
                worth[i] = balance * score[i] - (1 - balance) * likeness
        picks.append(max(worth, key=lambda i: (worth[i], -i)))
    return picks


def contextual(x: np.ndarray, dominant: list[int], count: int) -> Answer:
    """Dominant tokens, and evenly spaced others that the rest joins."""
    answer = pruned(len(x), dominant)
    rest = [i for i in range(len(x)) if i not in dominant]
    targets = [rest[(2 * i + 1) * len(rest) // (2 * count)] for i in range(count)]
    joined: dict[int, list[int]] = {target: [] for target in targets}
    for i in rest:
        if i not in joined and targets:
            joined[max(targets, key=lambda t: (alike(x[i], x[t]), -t))].append(i)
    for target, others in joined.items():
        answer.groups[target] = {target: 0.5 if others else 1.0}
        answer.groups[target] |= {other: 0.5 / len(others) for other in others}
    return answer


def visiondrop(item: Item, budget: int, contextual_share: float = 0.2) -> Answer:
    count = round(contextual_share * budget)
    dominant = ranked(item.signals["attn_visual"].tolist())[: budget - count]
    return contextual(item.x, dominant, count)


def greedyprune(item: Item, budget: int, balance: float = 0.5) -> Answer:
    return pruned(item.n, trade_off(rescaled(item.attn.tolist()), item.x, budget, balance, []))


def first_share(item: Item, budget: int) -> list[int]:
    """Tokens of the first frame: all, or a quarter of the budget by spatial novelty."""
    frames, rows, columns = item.grid or (1, 1, item.n)
    n = rows * columns
    if budget >= n:
        return list(range(n))
    novelty = []
    for i in range(n):
        neighbours = ([i - 1] if i % columns else []) + ([i - columns] if i >= columns else [])
        novelty.append(
            1 - max((cosine(item.x[i], item.x[j]) for j in neighbours), default=-math.inf)
        )
    return ranked(novelty)[: budget if frames == 1 else math.ceil(budget / 4)]


def dtd(item: Item, budget: int | None, threshold: float = 0.1) -> Answer:
    _, rows, columns = item.grid or (1, 1, item.n)
    n = rows * columns

    def kept(limit: float) -> dict[int, float]:
        found = {}
        for place in range(n):
            last = place
            for token in range(place + n, item.n, n):
                change = 1 - alike(item.x[token], item.x[last])
                if change > limit:
                    found[token] = change
                    last = token
        return found

    if budget is None:
        return pruned(item.n, [*range(n), *kept(threshold)])
    first = first_share(item, budget)
    count = budget - len(first)
    low, high = -(2**30), 2**31
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(kept(middle * STEP)) >= count else (low, middle)
    found = kept(low * STEP)
    return pruned(item.n, first + sorted(found, key=lambda i: (-found[i], i))[:count])


def averaged(n: int, boxes: list[np.ndarray]) -> Answer:
    """One output a box `[t, y, x]` of token numbers, at its middle."""
    answer = Answer(n)
    for box in boxes:
        middle = box[tuple((side - 1) // 2 for side in box.shape)]
        answer.groups[int(middle)] = {int(i): 1 / box.size for i in box.flatten()}
    return answer


def cut_frame(frame: np.ndarray, count: int) -> list[tuple[slice, slice]]:
    """Cut rows and columns into `count` parts, halving the longer side."""
    done = []

    def cut(sides: list[range], count: int) -> None:
        if count == 1:
            done.append(
                (slice(sides[0][0], sides[0][-1] + 1), slice(sides[1][0], sides[1][-1] + 1))
            )
            return
        axis = 0 if len(sides[0]) >= len(sides[1]) else 1
        side, slab = len(sides[axis]), len(sides[1 - axis])
        at = min(max(round(side * (count // 2) / count), 1), side - 1)
        left = max(round(count * at / side), 1, count - (side - at) * slab)
        left = min(left, count - 1, at * slab)
        for half, share in ((sides[axis][:at], left), (sides[axis][at:], count - left)):
            cut([half, sides[1]] if axis == 0 else [sides[0], half], share)

    cut([range(side) for side in frame.shape], count)
    return done


def even(total: int, parts: int) -> list[int]:
    """Whole shares that differ by one at most, the larger ones evenly spread."""
    return [(i + 1) * total // parts - i * total // parts for i in range(parts)]


def runs(length: int, count: int) -> list[slice]:
    ends = [length * i // count for i in range(count + 1)]
    return [slice(ends[i], ends[i + 1]) for i in range(count)]


def temporal_pool(item: Item, budget: int) -> Answer:
    frames, rows, columns = grid = item.grid or (1, 1, item.n)
    video = np.arange(item.n).reshape(grid)
    if budget <= rows * columns:
        return averaged(item.n, [video[:, y, x] for y, x in cut_frame(video[0], budget)])
    boxes = []
    for place, count in enumerate(even(budget, rows * columns)):
        y, x = divmod(place, columns)
        boxes += [video[run, y : y + 1, x : x + 1] for run in runs(frames, count)]
    return averaged(item.n, boxes)


def spatial_pool(item: Item, budget: int) -> Answer:
    frames = (item.grid or (1, 1, item.n))[0]
    video = np.arange(item.n).reshape(item.grid or (1, 1, item.n))
    if budget <= frames:
        return averaged(item.n, [video[run] for run in runs(frames, budget)])
    boxes = []
    for t, count in enumerate(even(budget, frames)):
        boxes += [video[t : t + 1, y, x] for y, x in cut_frame(video[t], count)]
    return averaged(item.n, boxes)


def token_sampling(item: Item, budget: int) -> Answer:
    frames, rows, columns = item.grid or (1, 1, item.n)
    n = rows * columns
    count = math.ceil(budget / n)
    keep: list[int] = []
    for i, share in enumerate(even(budget, count)):
        frame = math.floor((i + 0.5) * frames / count)
        keep += [frame * n + (2 * j + 1) * n // (2 * share) for j in range(share)]
    return pruned(item.n, keep)


def edges_of(
    metric: np.ndarray, tokens: list[int], tau: float
) -> dict[int, tuple[list[float], list[float]]]:
    """Of the tokens at even places of a list: cosines with those at odd places, and the edges."""
    found = {}
    for a in tokens[::2]:
        near = [alike(metric[a], metric[b]) for b in tokens[1::2]]
        found[a] = near, [c for c in near if c >= tau]
    return found


def least_alike(metric: np.ndarray, budget: int, part: int) -> list[int]:
    """Rounds that drop the tokens with the greatest sum of cosines to all that are left."""
    left = list(range(len(metric)))
    while len(left) > budget:
        worth = {a: snap(sum(cosine(metric[a], metric[b]) for b in left)) for a in left}
        part = min(len(left) - budget, max(1, len(left) // part))
        going = sorted(left, key=lambda a: (-worth[a], a))[:part]
        left = [a for a in left if a not in going]
    return left


def saint(
    item: Item,
    budget: int | None,
    tau: float = 0.75,
    neighbours: int = 5,
    gamma: float = 10.0,
    full: int = 0,
) -> Answer:
    metric = item.x if item.keys is None else item.keys
    if full and budget is not None:
        return pruned(item.n, least_alike(metric, budget, full))

    def redundancy(near: list[float], edges: list[float]) -> float:
        if not edges:
            return sum(near) / len(near)
        return len(edges) * math.exp(gamma * (sum(edges) / len(edges) - tau))

    left = list(range(item.n))
    while len(left) > (budget or 1):
        found = edges_of(metric, left, tau)
        if budget is None:
            count = sum(len(edges) >= neighbours for _, edges in found.values())
        else:
            count = min(len(left) - budget, math.ceil(len(found) / 2))
        going = sorted(found, key=lambda a: (-redundancy(*found[a]), a))[:count]
        left = [i for i in left if i not in going]
        if budget is None:
            break
    return pruned(item.n, left)


def script(item: Item, budget: int, tau: float = 0.8, floor: float = 0.8) -> Answer:
    going: list[int] = []
    if item.n > 1:
        found = edges_of(item.x, list(range(item.n)), tau)
        count = min(sum(bool(edges) for _, edges in found.values()), item.n - budget)
        going = sorted(found, key=lambda a: (-sum(found[a][1]), a))[:count]
    rest = [i for i in range(item.n) if i not in going]
    wanted = relevance(item.x, item.query)
    quality = [floor + (1 - floor) * q for q in rescaled([wanted[i] for i in rest])]
    return pruned(item.n, [rest[p] for p in dpp(item.x[rest], quality, budget)])


def ptp(item: Item, budget: int, balance: float = 0.5) -> Answer:
    frames = item.grid[0] if item.grid else 1
    region = [i * frames // item.n for i in range(item.n)]
    if "tile" in item.signals:
        region = item.signals["tile"].astype(int).tolist()
    names = sorted(set(region))
    members = {r: [i for i in range(item.n) if region[i] == r] for r in names}
    attn = item.attn.tolist()
    weights = []
    for r in names:
        few = math.ceil(len(members[r]) / 4)
        top = ranked(attn, members[r])[:few]
        weights.append(sum(attn[i] for i in sorted(top)) / few * len(members[r]))
    counts = shared(weights, budget, [len(members[r]) for r in names])
    wanted = rescaled(relevance(item.x, item.query))
    salient = rescaled(attn)
    score = [balance * s + (1 - balance) * w for s, w in zip(salient, wanted, strict=True)]
    keep = [i for r, c in zip(names, counts, strict=True) for i in ranked(score, members[r])[:c]]
    return pruned(item.n, keep)


def catp(item: Item, budget: int, balance: float = 0.5, surplus: float = 2.0) -> Answer:
    image = item.signals["image"].astype(int).tolist()
    names = sorted(set(image))
    members = [[i for i in range(item.n) if image[i] == name] for name in names]
    sizes = [len(m) for m in members]
    first = min(item.n, max(round(surplus * budget), len(names)))
    counts = [max(1, c) for c in shared([float(s) for s in sizes], first, sizes)]
    aligned = rescaled(relevance(item.x, item.query))
    left: list[int] = []
    best: list[int] = []
    for tokens, count in zip(members, counts, strict=True):
        picks = trade_off([aligned[i] for i in tokens], item.x[tokens], count, balance, [])
        left += [tokens[p] for p in picks]
        best.append(tokens[picks[0]])
    left = sorted(left)
    start = [left.index(i) for i in best] if budget >= len(names) else []
    picks = trade_off([aligned[i] for i in left], item.x[left], budget, balance, start)
    return pruned(item.n, [left[p] for p in picks])


def shots(video: np.ndarray, least: int, tau: float) -> list[list[int]]:
    """Lists of frames, cut where adjacent ones differ most and wherever they differ much."""
    means = video.mean(1)
    near = [alike(a, b) for a, b in pairwise(means)]
    cuts = set(ranked([-c for c in near])[: max(least, 1) - 1])
    cuts |= {i for i, c in enumerate(near) if c < tau}
    parts = [[0]]
    for t in range(1, len(video)):
        if t - 1 in cuts:
            parts.append([])
        parts[-1].append(t)
    return parts


def key_clip(item: Item, budget: int, clips: float = 0.5, tau: float = 0.9) -> Answer:
    frames = item.grid[0] if item.grid else 1
    video = item.x.reshape(frames, -1, item.x.shape[1])
    n = video.shape[1]
    parts = shots(video, math.ceil(frames / 4), tau)
    wanted = relevance(video.mean(1), item.query)
    score = [sum(wanted[t] for t in part) / len(part) for part in parts]
    order = ranked(score)
    chosen: list[list[int]] = []
    while sum(len(part) * n for part in chosen) < max(budget, clips * item.n):
        chosen.append(parts[order[len(chosen)]])
    sizes = [len(part) * n for part in chosen]
    keep: list[int] = []
    for part, count in zip(chosen, shared([float(s) for s in sizes], budget, sizes), strict=True):
        tokens = [t * n + p for t in part for p in range(n)]
        keep += [tokens[p] for p in apart(item.x[tokens], count)] if count else []
    return pruned(item.n, keep)


def a_tome(item: Item, budget: int | None, threshold: float = 0.85) -> Answer:
    metric = item.x if item.keys is None else item.keys
    groups = [[i] for i in range(item.n)]
    while len(groups) > (budget or 1):
        means = [metric[g].mean(0) for g in groups]
        best: dict[int, tuple[float, int]] = {}
        for a in range(0, len(groups), 2):
            sides = [b for b in (a - 1, a + 1) if 0 <= b < len(groups)]
            best[a] = max((alike(means[a], means[b]), -b) for b in sides)
        order = sorted(best, key=lambda a: (-best[a][0], a))
        if budget is None:
            order = [a for a in order if best[a][0] > threshold]
        else:
            order = order[: len(groups) - budget]
        if not order:
            break
        for a in order:
            groups[-best[a][1]] += groups[a]
        groups = [sorted(g) for i, g in enumerate(groups) if i not in order]
    answer = Answer(item.n)
    for group in groups:
        middle = group[(len(group) - 1) // 2]
        answer.groups[middle] = {i: 1 / len(group) for i in group}
    return answer


def audio_prune(item: Item, budget: int, coverage: float = 0.5) -> Answer:
    attn = item.attn.tolist()
    parts = max(1, round(coverage * budget)) if coverage else 0
    stretches: dict[int, list[int]] = {}
    for i in range(item.n):
        stretches.setdefault(i * parts // item.n, []).append(i)
    keep = [ranked(attn, s)[0] for s in stretches.values()] if parts else []
    others = [i for i in ranked(attn) if i not in keep]
    return pruned(item.n, keep + others[: budget - len(keep)])


def fastvid(
    item: Item,
    budget: int,
    segments: int = 8,
    tau: float = 0.9,
    context: float = 0.4,
    every: int = 4,
    neighbours: int = 4,
    beta: float = 0.6,
) -> Answer:
    frames = item.grid[0] if item.grid else 1
    video = item.x.reshape(frames, -1, item.x.shape[1])
    n = video.shape[1]
    parts = shots(video, min(segments, math.ceil(frames / 4)), tau)
    sizes = [len(part) * n for part in parts]
    answer = Answer(item.n)
    for part, quota in zip(parts, shared([float(s) for s in sizes], budget, sizes), strict=True):
        if not quota:
            continue
        anchor_frames = part[::-1][::every][::-1]
        count = min(round(quota * context), len(anchor_frames) * n)
        each = dict.fromkeys(part, 0)
        shares = shared([1.0] * len(anchor_frames), count, [n] * len(anchor_frames))
        each |= dict(zip(anchor_frames, shares, strict=True))
        most = shared([1.0] * len(part), quota - count, [n - each[f] for f in part])
        kept: list[int] = []
        for f, number in zip(part, most, strict=True):
            kept += ranked(item.attn.tolist(), list(range(f * n, f * n + n)))[:number]
        answer.groups |= {i: {i: 1.0} for i in kept}
        rest = [i for f in part for i in range(f * n, f * n + n) if i not in kept]
        for f in anchor_frames:
            own = [i for i in rest if i // n == f]
            points = [item.x[i] for i in own]
            anchors = (
                [own[c] for c in dpc(points, each[f], neighbours, few=False)] if each[f] else []
            )
            joined: dict[int, list[int]] = {a: [] for a in sorted(anchors)}
            for i in rest if anchors else []:
                joined[max(joined, key=lambda a: (alike(item.x[i], item.x[a]), -a))].append(i)
            for a, others in joined.items():
                part_of = max(beta, 1 / (len(others) + 1)) if others else 1.0
                group = {i: (1 - part_of) / len(others) for i in others}
                answer.groups[a] = group | {a: group.get(a, 0.0) + part_of}
    return answer


def info_rank(item: Item, budget: int, rank: float = 0.01) -> Answer:
    u, sigma, _ = np.linalg.svd(item.x, full_matrices=False)
    leading = [i for i in range(len(sigma)) if sigma[i] > rank * sigma[0]]
    score = [
        snap(sum(abs(u[t, i]) * sigma[i] for i in leading) / sigma[0]) if leading else 0.0
        for t in range(item.n)
    ]
    return pruned(item.n, ranked(score)[:budget])


def vispruner(item: Item, budget: int, important: float = 0.5) -> Answer:
    tile = item.signals.get("tile")
    frame = [i // (item.n // (item.grid[0] if item.grid else 1)) for i in range(item.n)]
    region = frame if tile is None else tile.tolist()
    parts = [[i for i in range(item.n) if region[i] == r] for r in sorted(set(region))]
    sizes = [len(part) for part in parts]
    keep: list[int] = []
    for part, count in zip(parts, shared([float(s) for s in sizes], budget, sizes), strict=True):
        order = ranked(item.attn.tolist(), part)
        first = int(count * important)
        keep += order[:first]
        rest = order[first:]
        while first < count and len(rest) > count - first:
            even, odd = rest[::2], rest[1::2]
            copies = [max(alike(item.x[i], item.x[j]) for j in odd) for i in even]
            by_copies = [even[place] for place in ranked(copies)]
            most = max(8, len(part) // 72)
            rest = by_copies[min(most, len(rest) - (count - first)) :] + odd
        keep += rest if first < count else []
    return pruned(item.n, keep)


ORACLES: Mapping[str, Callable[..., Answer]] = {
    "a_tome": a_tome,
    "audio_prune": audio_prune,
    "catp": catp,
    "dtd": dtd,
    "fastvid": fastvid,
    "greedyprune": greedyprune,
    "info_rank": info_rank,
    "key_clip": key_clip,
    "ptp": ptp,
    "saint": saint,
    "script": script,
    "spatial_pool": spatial_pool,
    "temporal_pool": temporal_pool,
    "token_sampling": token_sampling,
    "visiondrop": visiondrop,
    "vispruner": vispruner,
}
