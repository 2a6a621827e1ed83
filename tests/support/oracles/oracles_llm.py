"""Oracles of methods that run inside the language model; see oracles.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from oracle_base import Answer, Item, cosine, dpc, pruned, ranked
from oracles_encoder import shared


def _best(item: Item, score: list[float], budget: int) -> Answer:
    return pruned(item.n, ranked(score)[:budget])


def pyramiddrop(item: Item, budget: int) -> Answer:
    return _best(item, item.attn.tolist(), budget)


def adaptinfer(item: Item, budget: int) -> Answer:
    return _best(item, item.signals["attn_mutual"].tolist(), budget)


def fastkv(item: Item, budget: int, kernel: int = 7) -> Answer:
    score, side = item.signals["attn_window"], kernel // 2
    pooled = []
    for i in range(item.n):
        near = [score[j] for j in range(i - side, i + side + 1) if 0 <= j < item.n]
        pooled.append(sum(near) / len(near))
    return _best(item, pooled, budget)


def slimfer(item: Item, budget: int, block: int = 16) -> Answer:
    score = item.signals["attn_window"].tolist()
    blocks = [list(range(at, min(at + block, item.n))) for at in range(0, item.n, block)]
    means = [float(np.mean([score[i] for i in mine])) for mine in blocks]
    keep: list[int] = []
    for number in ranked(means):
        keep += ranked(score, blocks[number])[: budget - len(keep)]
    return pruned(item.n, keep)


def catp_inner(item: Item, budget: int, relevance: float = 0.6) -> Answer:
    image = item.signals["image"].tolist()
    groups = [[i for i in range(item.n) if (image[i] == max(image)) == so] for so in (False, True)]
    examples, own = groups if groups[0] else groups[::-1]
    asked = [i for i in range(item.n) if image[i] == max(image)]
    sizes = [len(examples), len(own)]
    counts = shared([float(n) for n in sizes], budget, sizes)
    asking = np.mean([*item.query, *(item.x[i] for i in asked)], axis=0)
    gained = item.attn - item.signals["attn_before"]
    score = [
        max(0.0, g) + relevance * cosine(x, asking) for g, x in zip(gained, item.x, strict=True)
    ]
    kept = ranked([round(s, 9) for s in score], examples)[: counts[0]]
    context = item.x[kept or examples].mean(0)
    near = [round(cosine(x, context), 9) for x in item.x]
    return pruned(item.n, kept + ranked(near, own)[: counts[1]])


def gemfilter(item: Item, budget: int, kernel: int = 5) -> Answer:
    score, side = item.signals["attn_ahead"].tolist(), kernel // 2
    near = [score[max(0, i - side) : i + side + 1] for i in range(item.n)]
    return _best(item, [sum(part) / len(part) for part in near], budget)


def dart(item: Item, budget: int, pivots: int = 4, words: int = 4) -> Answer:
    keep = ranked(item.signals["key_norm"].tolist())[: min(pivots, budget)]
    asking = [item.x[i] for i in keep]
    asking += [item.query[w] for w in ranked(item.signals["text_key_norm"].tolist())[:words]]
    missing = budget - len(keep)
    for number, pivot in enumerate(asking):
        share = missing // len(asking) + (1 if number < missing % len(asking) else 0)
        free = [i for i in range(item.n) if i not in keep]
        keep += sorted(free, key=lambda i: (round(cosine(pivot, item.x[i]), 9), i))[:share]
    return pruned(item.n, keep)


def sparsevlm(
    item: Item, budget: int | None, rate: float = 0.5, recycle: float = 0.3, group: int = 10
) -> Answer:
    speaks = [0.0] * len(item.query)
    for token in item.x:
        weight = [math.exp(cosine(token, word)) for word in item.query]
        speaks = [s + w / sum(weight) / item.n for s, w in zip(speaks, weight, strict=True)]
    mean = sum(speaks) / len(speaks)
    words = [w for w, s in enumerate(speaks) if s > mean + 1e-9] or list(range(len(speaks)))
    given = item.signals["attn_text"][:, words]

    def clusters(kept: int) -> int:
        """A tenth of those recycled, and one more."""
        dropped = item.n - kept
        pool = min(dropped, int(recycle * dropped) + 1) if recycle else 0
        return min(pool, pool // group + 1)

    if budget is None:
        kept = item.n - int(rate * (item.n - np.linalg.matrix_rank(given)))
        count = clusters(kept)
    else:
        fitting = [k for k in range(budget + 1) if k + clusters(k) <= budget]
        kept = max([*fitting, math.ceil(budget / 2)])
        count = budget - kept
    order = ranked([sum(row) / len(words) for row in given])
    answer = pruned(item.n, order[:kept])
    pool = sorted(order[kept:][: int(recycle * (item.n - kept)) + 1])
    if count:
        for centre, members in dpc([item.x[i] for i in pool], count, count).items():
            answer.groups[pool[centre]] = {pool[i]: 1 / len(members) for i in members}
    return answer


def ivc_prune(item: Item, budget: int, anchors: float = 0.4, seeds: float = 0.01) -> Answer:
    turn, text = item.signals["rope"], item.signals["text_values"]
    _, heads, width = text.shape
    values = item.signals["values"].reshape(item.n, heads, width)

    def liked(token: np.ndarray) -> list[float]:
        """Shares of the tokens in the likeness of one, mean over heads."""
        total = [0.0] * item.n
        for h in range(heads):
            power = [math.exp(float(token[h] @ v[h]) / math.sqrt(width)) for v in values]
            total = [t + p / sum(power) / heads for t, p in zip(total, power, strict=True)]
        return total

    def means(rows: list[list[float]]) -> list[float]:
        return [round(sum(column) / len(rows) * 2**30) for column in zip(*rows, strict=True)]

    each = round(anchors * budget / 2)
    keep = list(
        dict.fromkeys([i for side in (0, 1) for i in ranked(turn[:, side].tolist())[:each]])
    )
    rows = [liked(token) for token in text]
    count = min(max(1, round(seeds * item.n)), budget - len(keep))
    chosen = ranked(means(rows))[:count]
    score = means(rows + [liked(values[i]) for i in chosen])
    keep = list(dict.fromkeys(keep + chosen))
    return pruned(
        item.n,
        keep + ranked(score, [i for i in range(item.n) if i not in keep])[: budget - len(keep)],
    )


def prunevid_inner(item: Item, budget: int) -> Answer:
    return _best(item, item.signals["attn_peak"].tolist(), budget)


def lazyllm(item: Item, budget: int) -> Answer:
    return _best(item, item.attn.tolist(), budget)


def quicksilver(
    item: Item,
    budget: int | None,
    drift: float = 0.15,
    fuse: float = 0.1,
    start: float = 0.25,
) -> Answer:
    change, pairs, i = dict(enumerate(item.signals["drift"].tolist())), [], 0
    while i + 1 < item.n:
        a, b = item.x[i], item.x[i + 1]
        mean = (math.sqrt(a @ a) + math.sqrt(b @ b)) / 2
        gap = math.sqrt((a - b) @ (a - b)) / mean if mean else 0.0
        if gap < fuse:
            pairs.append((round(gap, 6), i))
        i += 2 if gap < fuse else 1
    pairs = sorted(pairs)[: item.n if budget is None else item.n - budget]
    for _, i in pairs:  # the later one stands for both
        change[i + 1] = (change[i] + change[i + 1]) / 2
        del change[i]
    order = sorted(change, key=lambda i: (-change[i], i))
    moving = [i for i in order if change[i] >= drift]
    answer = pruned(item.n, moving if budget is None else order[:budget])
    for _, i in pairs:
        if i + 1 in answer.groups:
            answer.groups[i + 1] = {i: 0.5, i + 1: 0.5}
    return answer


def skip_vision(item: Item, budget: int) -> Answer:
    best = ranked(item.signals["attn_visual"].tolist(), list(range(item.n - 1)))
    return pruned(item.n, [*best[: budget - 1], item.n - 1])


ORACLES: Mapping[str, Callable[..., Answer]] = {
    "adaptinfer": adaptinfer,
    "catp_inner": catp_inner,
    "dart": dart,
    "fastkv": fastkv,
    "gemfilter": gemfilter,
    "ivc_prune": ivc_prune,
    "lazyllm": lazyllm,
    "prunevid_inner": prunevid_inner,
    "pyramiddrop": pyramiddrop,
    "quicksilver": quicksilver,
    "skip_vision": skip_vision,
    "slimfer": slimfer,
    "sparsevlm": sparsevlm,
}
