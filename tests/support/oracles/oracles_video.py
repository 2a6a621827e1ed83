"""Oracles of methods that merge or share tokens over time; see oracles.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import combinations

import numpy as np
from oracle_base import Answer, Item, cosine, dpc, pruned, ranked
from oracles_compose import alike, rescaled, snap
from oracles_encoder import shared


def frames_of(item: Item) -> list[list[int]]:
    """Tokens of each frame."""
    count = item.grid[0] if item.grid else 1
    return [list(range(at, at + item.n // count)) for at in range(0, item.n, item.n // count)]


def framefusion(item: Item, budget: int | None, tau: float = 0.6) -> Answer:
    n = len(frames_of(item)[0])
    near = {i: alike(item.x[i], item.x[i - n]) for i in range(n, item.n)}
    joins = sorted((i for i in near if near[i] >= tau), key=lambda i: (-near[i], i))
    joins = joins if budget is None else joins[: item.n - budget]
    chains: dict[int, list[int]] = {}
    for i in range(item.n):
        first = i
        while first in joins:
            first -= n
        chains.setdefault(first, []).append(i)
    best = ranked(item.signals["attn_visual"].tolist(), sorted(chains))
    answer = Answer(item.n)
    for first in best if budget is None else best[:budget]:
        answer.groups[first] = {i: 1 / len(chains[first]) for i in chains[first]}
    return answer


def v_cast(item: Item, budget: int, temperature: float = 0.7) -> Answer:
    frames = frames_of(item)
    path = []
    for frame in frames:
        mean = sum(item.x[i] for i in frame) / len(frame)
        length = math.sqrt(float(mean @ mean))
        path.append(mean / length if length else mean)
    bend = [1.0] * len(frames)
    for t in range(1, len(frames) - 1):
        bend[t] = 1 - alike(path[t] - path[t - 1], path[t + 1] - path[t])
    weight = [math.exp(b / temperature) for b in bend]
    least = 1 if budget >= len(frames) else 0
    caps = [len(frame) - least for frame in frames]
    more = shared(weight, budget - least * len(frames), caps)
    keep: list[int] = []
    for frame, centre, count in zip(frames, path, more, strict=True):
        long = rescaled([math.sqrt(float(item.x[i] @ item.x[i])) for i in frame])
        odd = [1 - cosine(item.x[i], centre) for i in frame]
        score = [snap(a + b) for a, b in zip(long, odd, strict=True)]
        keep += [frame[i] for i in ranked(score)[: count + least]]
    return pruned(item.n, keep)


def contiguous(labels: list[int]) -> list[list[int]]:
    """Frames of each scene: runs of one cluster that are its longest, and what joins them."""
    count = len(labels)

    def run(t: int, of: list[int]) -> list[int]:
        first = last = t
        while first and of[first - 1] == of[t]:
            first -= 1
        while last + 1 < count and of[last + 1] == of[t]:
            last += 1
        return list(range(first, last + 1))

    longest = {c: max(len(run(t, labels)) for t in range(count) if labels[t] == c) for c in labels}
    new = list(labels)
    for t in range(count):
        length = len(run(t, labels))
        if length == 1 or length < longest[labels[t]]:
            new[t] = -1
    for t in range(count):
        if new[t] == -1:
            gap = run(t, new)
            left = len(run(t - 1, new)) if t else 0
            right = len(run(gap[-1] + 1, new)) if gap[-1] + 1 < count else 0
            label = (
                0 if not left and not right else new[gap[-1] + 1] if right > left else new[t - 1]
            )
            for frame in gap:
                new[frame] = label
    starts = [t for t in range(count) if t == 0 or new[t] != new[t - 1]]
    return [run(t, new) for t in starts]


def scenes_of(item: Item, share: float) -> list[list[int]]:
    """Frames of each scene, from density peaks of their means."""
    means = [sum(item.x[i] for i in frame) / len(frame) for frame in frames_of(item)]
    of_frame = [0] * len(means)
    found = dpc(means, max(1, int(len(means) * share)), 7, few=False)
    for number, centre in enumerate(sorted(found)):
        for frame in found[centre]:
            of_frame[frame] = number
    return contiguous(of_frame)


def prunevid(
    item: Item, budget: int | None, tau: float = 0.8, scenes: float = 0.25, clusters: float = 0.5
) -> Answer:
    frames = frames_of(item)
    n = len(frames[0])
    parts = scenes_of(item, scenes)
    static: dict[tuple[int, int], float] = {}
    for number, part in enumerate(parts):
        for p in range(n):
            pairs = [
                cosine(item.x[frames[a][p]], item.x[frames[b][p]]) for a, b in combinations(part, 2)
            ]
            if pairs and snap(sum(pairs) / len(pairs)) > tau:
                static[number, p] = snap(sum(pairs) / len(pairs))

    def groups() -> list[list[list[int]]]:
        """Groups of points, each point a list of tokens, the one that stands for it first."""
        made = []
        for number, part in enumerate(parts):
            made.append([[frames[t][p] for t in part] for p in range(n) if (number, p) in static])
            made += [[[frames[t][p]] for p in range(n) if (number, p) not in static] for t in part]
        return made

    while budget is not None and sum(map(len, groups())) < budget:
        del static[min(static, key=lambda place: (static[place], place))]
    sizes = [len(group) for group in groups()]
    if budget is None:
        counts = [size if size <= 14 else int(size * clusters) for size in sizes]
    else:
        counts = shared([float(size) for size in sizes], budget, sizes)
    answer = Answer(item.n)
    for group, count in zip(groups(), counts, strict=True):
        members = {i: [i] for i in range(len(group))}
        if 0 < count < len(group):
            points = [np.mean([item.x[i] for i in point], axis=0) for point in group]
            members = dpc(points, count, 7, few=False)
        for centre, joined in members.items() if count else ():
            sources = [i for point in joined for i in group[point]]
            answer.groups[group[centre][0]] = {i: 1 / len(sources) for i in sources}
    return answer


ORACLES: Mapping[str, Callable[..., Answer]] = {
    "framefusion": framefusion,
    "prunevid": prunevid,
    "v_cast": v_cast,
}
