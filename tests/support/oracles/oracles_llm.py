"""Oracles of methods that run inside the language model; see oracles.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from oracle_base import Answer, Item, pruned, ranked


def _best(item: Item, score: list[float], budget: int) -> Answer:
    return pruned(item.n, ranked(score)[:budget])


def pyramiddrop(item: Item, budget: int) -> Answer:
    return _best(item, item.attn.tolist(), budget)


def adaptinfer(item: Item, budget: int) -> Answer:
    given, weight = item.signals["attn_text"], item.signals["text_attn"]
    score = [sum(w * g for w, g in zip(weight, row, strict=True)) for row in given]
    return _best(item, score, budget)


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


def gemfilter(item: Item, budget: int) -> Answer:
    return _best(item, item.signals["attn_ahead"].tolist(), budget)


def lazyllm(item: Item, budget: int) -> Answer:
    return _best(item, item.attn.tolist(), budget)


ORACLES: Mapping[str, Callable[..., Answer]] = {
    "adaptinfer": adaptinfer,
    "fastkv": fastkv,
    "gemfilter": gemfilter,
    "lazyllm": lazyllm,
    "pyramiddrop": pyramiddrop,
    "slimfer": slimfer,
}
