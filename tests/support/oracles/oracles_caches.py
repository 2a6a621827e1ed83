"""Slow, obvious versions of every cache policy: loops over the written rule, in float64.

An oracle answers for each head which sources stand for the outputs and how they are combined; the
store's oracle gives back the rounded numbers. They share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from oracle_base import Answer, cosine, pruned, ranked


@dataclass
class Layer:
    """Keys of one layer of one conversation."""

    keys: np.ndarray  # [H, N, d]
    kind: list[int]  # [N]
    window: np.ndarray  # [H, N]
    total: np.ndarray  # [H, N]
    number: int = 0

    @property
    def heads(self) -> range:
        return range(len(self.keys))

    @property
    def n(self) -> int:
        return self.keys.shape[1]

    def alike(self, keep: list[int]) -> list[Answer]:
        return [pruned(self.n, sorted(keep)) for _ in self.heads]


Answers = list[Answer]


def sink(layer: Layer, budget: int) -> Answers:
    return layer.alike(list(range(budget)))


def window(layer: Layer, budget: int) -> Answers:
    return layer.alike(list(range(layer.n))[-budget:])


def streamingvlm(layer: Layer, budget: int, sink: float = 0.125, text: float = 0.125) -> Answers:
    words = [i for i in range(layer.n) if layer.kind[i] == 0]
    frames = [i for i in range(layer.n) if layer.kind[i] != 0]
    sinks = min(int(sink) if sink >= 1 else round(sink * budget), budget)
    latest = min(int(text) if text >= 1 else round(text * budget), budget - sinks)
    keep = set(words[:sinks])
    rest = [i for i in words if i not in keep]
    while rest and latest:
        keep.add(rest.pop())
        latest -= 1
    while frames and len(keep) < budget:
        keep.add(frames.pop())
    while rest and len(keep) < budget:
        keep.add(rest.pop())
    return layer.alike(list(keep))


def _voted(layer: Layer, budget: int, window: int, kernel: int, pool: str) -> Answers:
    last = min(window, max(budget // 2, 1))
    before, side, answers = layer.n - last, kernel // 2, []
    for head in layer.heads:
        score = []
        for i in range(before):
            near = [layer.window[head, j] for j in range(i - side, i + side + 1) if 0 <= j < before]
            score.append(max(near) if pool == "max" else sum(near) / len(near))
        chosen = ranked(score)[: budget - last]
        answers.append(pruned(layer.n, chosen + list(range(before, layer.n))))
    return answers


def snapkv(
    layer: Layer, budget: int, window: int = 32, kernel: int = 7, pool: str = "max"
) -> Answers:
    return _voted(layer, budget, window, kernel, pool)


def fastkv(layer: Layer, budget: int, window: int = 8, kernel: int = 7) -> Answers:
    return _voted(layer, budget, window, kernel, "mean")


def keynorm(layer: Layer, budget: int, group: int = 1024) -> Answers:
    length = [-float((layer.keys[:, i] ** 2).sum()) for i in range(layer.n)]
    words = [i for i in range(layer.n) if layer.kind[i] == 0]
    frames = [i for i in range(layer.n) if layer.kind[i] != 0]
    keep = ranked(length, words)[:budget]
    left = budget - len(keep)
    groups = [frames[at : at + group] for at in range(0, len(frames), group)]
    quota = [Fraction(left * len(mine), max(len(frames), 1)) for mine in groups]
    counts = [math.floor(q) for q in quota]
    order = sorted(range(len(groups)), key=lambda g: (counts[g] - quota[g], g))
    for g in order[: left - sum(counts)]:
        counts[g] += 1
    for mine, number in zip(groups, counts, strict=True):
        keep += ranked(length, mine)[:number]
    return layer.alike(keep)


def keyformer(
    layer: Layer, budget: int, recent: float = 0.25, noise: float = 1.0, seed: int = 0
) -> Answers:
    generator = torch.Generator().manual_seed(1009 * seed + layer.number)
    draw = torch.rand(layer.total.shape, dtype=torch.float64, generator=generator).tolist()
    last, answers = round(recent * budget), []
    for head in layer.heads:
        score = []
        for i in range(layer.n - last):
            gumbel = -math.log(-math.log(draw[head][i])) if noise else 0.0
            score.append(math.log(max(layer.total[head, i], 1e-30)) + noise * gumbel)
        keep = ranked(score)[: budget - last] + list(range(layer.n - last, layer.n))
        answers.append(pruned(layer.n, keep))
    return answers


def _share(fold: str, own: np.ndarray, others: list[np.ndarray]) -> list[float]:
    """Weights of a kept token and of those that join it."""
    if fold == "averaged":
        parts = [1.0] + [1.0 for _ in others]
    elif fold == "pivotal":  # the mean of k and of every (k + e) / 2
        parts = [1.0 + 0.5 * len(others)] + [0.5 for _ in others]
    else:
        parts = [1.0] + [max(cosine(own, other), 0.0) for other in others]
    return [part / sum(parts) for part in parts]


def lookm(layer: Layer, budget: int, recent: float = 0.5, merge: str = "pivotal") -> Answers:
    last, answers = round(recent * budget), []
    for head in layer.heads:
        keys, before = layer.keys[head], range(layer.n - last)
        score = [float(layer.total[head, i]) for i in range(layer.n)]
        words = ranked(score, [i for i in before if layer.kind[i] == 0])
        frames = ranked(score, [i for i in before if layer.kind[i] != 0])
        keep = sorted((words + frames)[: budget - last]) + list(range(layer.n - last, layer.n))
        joined: dict[int, list[int]] = {k: [] for k in keep}
        for i in range(layer.n):
            if i not in joined and layer.kind[i] != 0 and merge != "none":
                alike = [cosine(keys[i], keys[k]) for k in keep]
                # Cosines of equal keys may differ in the last bits; the first kept one wins.
                joined[keep[next(s for s, a in enumerate(alike) if a >= max(alike) - 1e-9)]] += [i]
        answer = Answer(layer.n)
        for k, others in joined.items():
            shares = _share(merge, keys[k], [keys[i] for i in others])
            answer.groups[k] = dict(zip([k, *others], shares, strict=True))
        answers.append(answer)
    return answers


def zipvl(layer: Layer, budget: int | None, mass: float = 0.975) -> Answers:
    received = [float(sum(layer.total[h, i] for h in layer.heads)) for i in range(layer.n)]
    if budget is None:
        budget, held, order = 0, 0.0, ranked(received)
        while held < mass * sum(received) * (1 - 1e-9) or budget == 0:
            held += received[order[budget]]
            budget += 1
    score = [received[i] / (layer.n - i) for i in range(layer.n)]
    return layer.alike(ranked(score)[:budget])


def _runs(count: int, size: int) -> list[range]:
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


def quant(x: np.ndarray, bits: int, keys: bool, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """A float32 `[n, d]` rounded group by group, and the step at every number."""
    found, steps = np.zeros(x.shape), np.zeros(x.shape)
    places = [np.ix_(run, [c]) for run in _runs(len(x), group) for c in range(x.shape[1])]
    if not keys:
        places = [np.ix_([t], run) for t in range(len(x)) for run in _runs(x.shape[1], group)]
    for place in places:
        low, high = float(x[place].min()), float(x[place].max())
        step = (high - low) / (2**bits - 1)
        steps[place] = step
        for where in zip(*(axis.ravel() for axis in np.broadcast_arrays(*place)), strict=True):
            code = round((float(x[where]) - low) / step) if step else 0
            found[where] = low + code * step
    return found, steps


ORACLES: Mapping[str, Callable[..., Answers]] = {
    "fastkv": fastkv,
    "keyformer": keyformer,
    "keynorm": keynorm,
    "lookm": lookm,
    "sink": sink,
    "snapkv": snapkv,
    "streamingvlm": streamingvlm,
    "window": window,
    "zipvl": zipvl,
}
STORES: Mapping[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {"quant": quant}
