"""Slow, obvious versions of every cache policy: loops over the written rule, in float64.

An oracle answers for each head which sources stand for the outputs and how they are combined; the
store's oracle gives back the rounded numbers. They share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

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
    depth: tuple[int, int] = (0, 1)
    values: np.ndarray | None = None  # [H, N, d]
    frame: list[int] | None = None  # [N]
    spot: list[int] | None = None  # [N]
    out: np.ndarray | None = None  # [H, N]
    mean: np.ndarray | None = None  # [H, G, d], on the scale of logits
    cov: np.ndarray | None = None  # [H, G, d, d]
    filters: np.ndarray | None = None  # [H, d]
    counted: np.ndarray | None = None  # [H, N]
    mutual: np.ndarray | None = None  # [H, N]
    repeated: np.ndarray | None = None  # [H, N]
    layers: list[np.ndarray] | None = None  # `repeated` of all layers
    vision: np.ndarray | None = None  # [H, N]
    gated: np.ndarray | None = None  # [H, N]
    probed: np.ndarray | None = None  # [H, N]

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


def _pooled(
    votes: np.ndarray, before: int, kernel: int, pool: str, padded: bool = True
) -> list[float]:
    side, score = kernel // 2, []
    for i in range(before):
        near = [votes[j] for j in range(i - side, i + side + 1) if 0 <= j < before]
        score.append(max(near) if pool == "max" else sum(near) / (kernel if padded else len(near)))
    return score


def _voted(
    layer: Layer, budget: int, window: int, kernel: int, pool: str, last: int | None = None
) -> Answers:
    last, answers = min(window, max(budget // 2, 1)) if last is None else last, []
    before = layer.n - last
    for head in layer.heads:
        score = _pooled(layer.window[head], before, kernel, pool)
        chosen = ranked(score)[: budget - last]
        answers.append(pruned(layer.n, chosen + list(range(before, layer.n))))
    return answers


def snapkv(
    layer: Layer, budget: int, window: int = 32, kernel: int = 7, pool: str = "max"
) -> Answers:
    return _voted(layer, budget, window, kernel, pool)


def fastkv(layer: Layer, budget: int, window: int = 8, kernel: int = 7) -> Answers:
    return _voted(layer, budget, window, kernel, "mean")


def finch(layer: Layer, budget: int, window: int = 32, chunk: int = 1024) -> Answers:
    assert layer.counted is not None
    last = min(window, max(budget // 2, 1))
    before, answers = layer.n - last, []
    size = chunk or before
    chunks = [list(range(at, min(at + size, before))) for at in range(0, before, size)]
    quota = [Fraction((budget - last) * len(mine), before) for mine in chunks]
    counts = [math.floor(q) for q in quota]
    order = sorted(range(len(chunks)), key=lambda c: (counts[c] - quota[c], c))
    for c in order[: budget - last - sum(counts)]:
        counts[c] += 1
    for head in layer.counted:
        keep = list(range(before, layer.n))
        for mine, number in zip(chunks, counts, strict=True):
            keep += ranked([float(s) for s in head], mine)[:number]
        answers.append(pruned(layer.n, keep))
    return answers


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


def zipcache(layer: Layer, budget: int) -> Answers:
    assert layer.probed is not None
    score = [float(sum(layer.probed[h, i] for h in layer.heads)) for i in range(layer.n)]
    return layer.alike(ranked(score)[:budget])


class ZipCache:
    """One layer of a conversation under `zipcache`: who asks, what is salient, what is rounded."""

    def __init__(self, budget: float, recent: float, random: float, seed: int, every: int) -> None:
        self.budget, self.recent, self.random = budget, recent, random
        self.seed, self.every = seed, every
        self.sums: list[float] = []  # what each token got, of all heads
        self.asked: list[int] = []
        self.packed = self.prompt = 0
        self.shown = 0

    def draws(self, number: int) -> bool:
        """Whether chance makes a probe of a token: the finaliser of MurmurHash3, in 32 bits."""
        word = (number + (self.seed + 1) * 0x9E3779B9) % 2**32
        word = (word ^ word >> 16) * 0x85EBCA6B % 2**32
        word = (word ^ word >> 13) * 0xC2B2AE35 % 2**32
        return (word ^ word >> 16) < round(self.random * 2**32)

    def asks(self, number: int) -> bool:
        """Whether token `number` is a probe."""
        if number < self.prompt:
            last = max(1, round(self.recent * self.prompt))
            return number >= self.prompt - last or self.draws(number)
        last = max(1, round(self.recent * self.every))
        return (number - self.prompt) % self.every >= self.every - last or self.draws(number)

    def saw(self, weights: np.ndarray) -> None:
        """Take the attention `[Hq, n, S]` of a prompt, or of one token of an answer."""
        count, size = weights.shape[1:]
        self.prompt = self.prompt or size
        self.sums += [0.0] * (size - len(self.sums))
        self.asked += [0] * (size - len(self.asked))
        for row in range(count):
            number = self.shown + row
            if self.asks(number):
                for i in range(min(number + 1, size)):
                    self.sums[i] += float(weights[:, row, i].sum())
                    self.asked[i] += 1
        self.shown += count

    def before_a_step(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Round what is due of keys and values `[H, S, d]`: the prompt, then whole blocks."""
        if self.packed == 0:
            due = self.prompt
        else:
            due = self.every if self.shown - self.packed >= self.every else 0
        if not due:
            return keys, values
        block = list(range(self.packed, self.packed + due))
        number = self.budget
        if isinstance(number, float):
            number = max(1, round(number * due))
        elif due != self.prompt:
            number = max(1, round(number / self.prompt * due))
        score = [self.sums[i] / max(1, self.asked[i]) for i in block]
        salient = {block[i] for i in ranked(score)[:number]}
        for bits, part in ((4, salient), (2, set(block) - salient)):
            where = sorted(part)
            if where:
                keys[:, where] = self.by_channel(keys[:, where], bits)
                values[:, where] = self.apart(values[:, where], bits)
        self.packed += due
        return keys, values

    @staticmethod
    def rounded(row: np.ndarray, bits: int) -> np.ndarray:
        low, high = row.min(), row.max()
        step = (high - low) / (2**bits - 1)
        return row if step == 0 else np.round((row - low) / step) * step + low

    @classmethod
    def by_channel(cls, x: np.ndarray, bits: int) -> np.ndarray:
        """Each channel of `[H, n, d]` has a scale."""
        found = x.copy()
        for head in range(len(x)):
            for channel in range(x.shape[2]):
                found[head, :, channel] = cls.rounded(x[head, :, channel], bits)
        return found

    @classmethod
    def apart(cls, x: np.ndarray, bits: int) -> np.ndarray:
        """Each token of `[H, n, d]` has one scale, once its channels are alike in size."""
        size = np.sqrt(np.abs(x).max(1, keepdims=True))
        size[size == 0] = 1
        found = x / size
        for token in range(x.shape[1]):
            found[:, token] = cls.rounded(found[:, token], bits)
        return found * size


def _level(score: float) -> int:
    """A score in steps of 2^-30: sums in another order must not break a tie."""
    return round(score * 2**30)


def random(layer: Layer, budget: int, seed: int = 0) -> Answers:
    generator = torch.Generator().manual_seed(1009 * seed + layer.number)
    shape = (len(layer.keys), layer.n)
    draw = torch.rand(shape, dtype=torch.float64, generator=generator).tolist()
    return [pruned(layer.n, ranked(draw[head])[:budget]) for head in layer.heads]


def tova(layer: Layer, budget: int, window: int = 1) -> Answers:
    heads = len(layer.window)
    score = [_level(sum(layer.window[h, i] for h in layer.heads) / heads) for i in range(layer.n)]
    return layer.alike(ranked(score)[:budget])


def _direction(row: np.ndarray) -> np.ndarray:
    length = math.sqrt(sum(float(c) ** 2 for c in row))
    return row / length if length > 2.0**-40 else row * 2.0**40


def keydiff(layer: Layer, budget: int) -> Answers:
    answers = []
    for head in layer.heads:
        units = [_direction(key) for key in layer.keys[head]]
        anchor = _direction(np.array(sum(units)) / layer.n)
        score = [-_level(float(unit @ anchor)) for unit in units]
        answers.append(pruned(layer.n, ranked(score)[:budget]))
    return answers


def _lag_scores(mine: np.ndarray, behind: np.ndarray) -> list[float]:
    """Softmax over a part `[s, d]` of the deviation over channels, on the next part's scale."""
    spread = []
    for row in mine:
        scaled = []
        for c, number in enumerate(row):
            low, high = min(behind[:, c]), max(behind[:, c])
            scaled.append((number - low) / (high - low if high > low else 1.0))
        mean = sum(scaled) / len(scaled)
        spread.append(math.sqrt(sum((s - mean) ** 2 for s in scaled) / (len(scaled) - 1)))
    powers = [math.exp(s - max(spread)) for s in spread]
    return [power / sum(powers) for power in powers]


def lagkv(layer: Layer, budget: int, sink: int = 16, lag: int = 128) -> Answers:
    assert layer.values is not None
    first, size, answers = min(sink, budget // 4), max(1, min(lag, budget // 4)), []
    starts = list(range(first, layer.n - size + 1, size))
    end = starts[-1]
    share, more = divmod(budget - first - (layer.n - end), max(len(starts) - 1, 1))
    for head in layer.heads:
        keep = [*range(first), *range(end, layer.n)]
        for number, at in enumerate(starts[:-1]):
            parts = [
                _lag_scores(x[head, at : at + size], x[head, at + size : at + 2 * size])
                for x in (layer.keys, layer.values)
            ]
            score = [_level(k + v) for k, v in zip(*parts, strict=True)]
            keep += [at + i for i in ranked(score)[: share + (number < more)]]
        answers.append(pruned(layer.n, keep))
    return answers


def chunkkv(layer: Layer, budget: int, window: int = 32, chunk: int = 10) -> Answers:
    last = min(window, max(budget // 2, 1))
    before = layer.n - last
    score, heads = [], len(layer.window)
    for i in range(before):
        mates = [j for j in range(before) if j // chunk == i // chunk]
        total = sum(layer.window[h, j] for h in layer.heads for j in mates)
        score.append(_level(total / heads / len(mates)))
    return layer.alike(ranked(score)[: budget - last] + list(range(before, layer.n)))


def curdkv(layer: Layer, budget: int, sink: int = 4, rank: int = 20, seed: int = 0) -> Answers:
    assert layer.values is not None
    width, answers = layer.keys.shape[-1], []
    plane = np.eye(width)
    if rank:
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(width, rank, dtype=torch.float64, generator=generator)
        plane = draw.numpy() / math.sqrt(rank)
    for head in layer.heads:
        score = []
        for key, value in zip(layer.keys[head], layer.values[head], strict=True):
            lengths = [sum(float(row @ column) ** 2 for column in plane.T) for row in (key, value)]
            score.append(_level(math.log(max(lengths[0] * lengths[1], 1e-30))))
        first = list(range(min(sink, budget)))
        rest = ranked(score, list(range(len(first), layer.n)))[: budget - len(first)]
        answers.append(pruned(layer.n, first + rest))
    return answers


def knorm(layer: Layer, budget: int) -> Answers:
    answers = []
    for head in layer.keys:
        lengths = [math.sqrt(float(key @ key)) for key in head]
        steps = [-round(each / max(*lengths, 1e-30) * 2**16) for each in lengths]
        answers.append(pruned(layer.n, ranked(steps)[:budget]))
    return answers


def entropy_chunkkv(
    layer: Layer, budget: int, window: int = 32, chunk: int = 10, few: int = 4
) -> Answers:
    last = min(window, max(budget // 2, 1))
    before = layer.n - last
    votes = [sum(head[i] for head in layer.window) / len(layer.keys) for i in range(before)]
    score = [_level(vote) / 2**30 for vote in votes]
    chunks = [list(range(at, min(at + chunk, before))) for at in range(0, before, chunk)]
    means, spreads = [], []
    for mine in chunks:
        total, spread = sum(score[i] for i in mine), 0.0
        means.append(_level(total / len(mine)))
        for i in mine:
            share = score[i] / total if total else 0.0
            spread -= share * math.log(share) if share else 0.0
        spreads.append(_level(spread / math.log(len(mine))) if len(mine) > 1 else 0.0)
    middle = [sorted(each)[(len(each) - 1) // 2] if each else 0.0 for each in (means, spreads)]
    keep: list[int] = []
    for c in ranked(means):
        gated = means[c] >= middle[0] and spreads[c] < middle[1]
        room = min(budget - last - len(keep), few if gated else chunk)
        keep += ranked(score, chunks[c])[:room]
    rest = ranked(score, [i for i in range(before) if i not in keep])
    keep += rest[: budget - last - len(keep)]
    return layer.alike(keep + list(range(before, layer.n)))


def _heavy(layer: Layer, score: list[float], budget: int, first: int, recent: float) -> Answer:
    last = min(round(recent * budget), budget - first)
    keep = [*range(first), *range(layer.n - last, layer.n)]
    rest = ranked(score, list(range(first, layer.n - last)))
    return pruned(layer.n, keep + rest[: budget - first - last])


def h2o(layer: Layer, budget: int, recent: float = 0.5) -> Answers:
    return [_heavy(layer, list(head), budget, 0, recent) for head in layer.total]


def cam(layer: Layer, budget: int, recent: float = 0.5, merge: int = 32) -> Answers:
    answers = []
    for attn in layer.total.tolist():
        answer = _heavy(layer, attn, budget, 0, recent)
        answer.own_keys = True
        for i in range(layer.n):
            next_ones = [k for k in answer.keep if k > i][:merge]
            if i in answer.groups or not next_ones:
                continue
            mean = sum(attn[k] for k in next_ones) / len(next_ones)
            chance = min(attn[i] / mean, 1.0) if mean else float(attn[i] > 0)
            for k in next_ones:
                answer.groups[k][i] = chance / len(next_ones)
        answers.append(answer)
    return answers


def vatp(layer: Layer, budget: int, sink: int = 20, recent: float = 0.5) -> Answers:
    assert layer.values is not None
    answers = []
    for head in layer.heads:
        sizes = [sum(abs(float(c)) for c in value) for value in layer.values[head]]
        score = [_level(float(layer.total[head, i]) * sizes[i]) for i in range(layer.n)]
        answers.append(_heavy(layer, score, budget, min(sink, budget // 4), recent))
    return answers


def _leverages(keys: np.ndarray, rank: int, seed: int) -> list[float]:
    """Ridge leverage of rows `[N, d]` about their mean, by the inverse of the Gram matrix."""
    rows = keys - keys.mean(0)
    if 0 < rank < rows.shape[1]:
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(rows.shape[1], rank, dtype=torch.float64, generator=generator)
        rows = rows @ draw.numpy() / math.sqrt(rank)
    gram = sum(np.outer(row, row) for row in rows)
    ridge = 1e-3 * np.trace(gram) / len(gram) + 2.0**-40
    inverse = np.linalg.inv(gram + ridge * np.eye(len(gram)))
    return [float(row @ inverse @ row) for row in rows]


def leverage(
    layer: Layer, budget: int, sink: int = 8, recent: int = 4, rank: int = 48, seed: int = 0
) -> Answers:
    first, last, answers = min(sink, budget // 4), min(recent, budget // 4), []
    for head in layer.heads:
        score = [_level(each) for each in _leverages(layer.keys[head], rank, seed)]
        rest = ranked(score, list(range(first, layer.n - last)))[: budget - first - last]
        keep = [*range(first), *rest, *range(layer.n - last, layer.n)]
        answers.append(pruned(layer.n, keep))
    return answers


def _standard(score: list[float]) -> list[float]:
    mean = sum(score) / len(score)
    deviation = math.sqrt(sum((s - mean) ** 2 for s in score) / len(score))
    return [(s - mean) / max(deviation, 1e-6) for s in score]


def compactor(
    layer: Layer,
    budget: int,
    sink: int = 8,
    recent: int = 4,
    chunk: int = 256,
    blend: float = 0.5,
    rank: int = 48,
    seed: int = 0,
) -> Answers:
    assert layer.values is not None and layer.mutual is not None
    first, last, answers = min(sink, budget // 4), min(recent, budget // 4), []
    some = list(range(first, layer.n - last))
    for head in layer.heads:
        lengths = [math.sqrt(sum(float(c) ** 2 for c in v)) for v in layer.values[head]]
        votes = np.array([float(m) * s for m, s in zip(layer.mutual[head], lengths, strict=True)])
        around = _pooled(votes, layer.n, 3, "mean", padded=False)
        pooled = _standard([around[i] for i in some])
        reach = _standard(_leverages(layer.keys[head, some], rank, seed))
        score = [_level(a + blend * r) for a, r in zip(pooled, reach, strict=True)]
        best = [some[i] for i in ranked(score)[: budget - first - last]]
        answers.append(pruned(layer.n, [*range(first), *best, *range(layer.n - last, layer.n)]))
    return answers


def mutual(query: np.ndarray, key: np.ndarray, chunk: int, sink: int, recent: int) -> np.ndarray:
    """Attention `[H, N]` within chunks, in both directions, of queries `[Hq, N, d]`."""
    heads, n = key.shape[:2]
    groups, found = len(query) // heads, np.zeros((heads, n))
    for at in range(sink, n - recent, chunk):
        mates = list(range(at, min(at + chunk, n - recent)))
        for head in range(len(query)):
            for i in mates:
                logits = [float(query[head, i] @ key[head // groups, j]) for j in mates]
                powers = [math.exp(each - max(logits)) for each in logits]
                for j, power in zip(mates, powers, strict=True):
                    found[head // groups, j] += power / sum(powers) / groups
    return found


def kvzip(layer: Layer, budget: int, chunk: int = 2048) -> Answers:
    assert layer.repeated is not None
    some = [[_level(float(s)) for s in head] for head in layer.repeated]
    return [pruned(layer.n, ranked(score)[:budget]) for score in some]


def kvsquared(layer: Layer, budget: int, chunk: int = 2048, asks: float = 0.02) -> Answers:
    return kvzip(layer, budget, chunk)


def fastkvzip(layer: Layer, budget: int, sink: int = 4, recent: float = 0.02) -> Answers:
    assert layer.gated is not None
    first = min(sink, budget // 4)
    last = min(math.floor(recent * layer.n), 4096, budget // 4)
    ends = [*range(first), *range(layer.n - last, layer.n)]
    answers = []
    for head in layer.gated:
        rest = [i for i in ranked([_level(float(s)) for s in head]) if i not in ends]
        answers.append(pruned(layer.n, sorted([*ends, *rest[: budget - len(ends)]])))
    return answers


def gate(states: np.ndarray, parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Scores `[H, N]` of states `[N, D]`: the weight of a token's own key beside the sinks."""
    heads, groups = parts["bias"].shape
    rank = parts["sinks"].shape[-1]
    found = np.zeros((heads, len(states)))
    for place, state in enumerate(states):
        query = parts["query.weight"] @ state + parts["query.bias"]
        key = parts["key.weight"] @ state
        for head in range(heads):
            own = _levelled(key[head * rank :][:rank], parts["key_scale"])
            for group in range(groups):
                start = (head * groups + group) * rank
                asks = _levelled(query[start:][:rank], parts["query_scale"])
                mine = math.exp(float(asks @ own) / math.sqrt(rank) + parts["bias"][head, group])
                others = [float(asks @ s) / math.sqrt(rank) for s in parts["sinks"][head]]
                found[head, place] += mine / (mine + sum(map(math.exp, others))) / groups
    return found


def _levelled(vector: np.ndarray, scale: np.ndarray) -> np.ndarray:
    mean = sum(float(x) ** 2 for x in vector) / len(vector)
    return np.array([float(x) / math.sqrt(mean + 1e-6) for x in vector]) * scale


def oddest(layers: list[np.ndarray], share: float) -> list[int]:
    """Tokens whose keys, of layers `[H, c, d]`, look least like the mean direction, in order."""
    count = layers[0].shape[1]
    score = np.zeros(count)
    for keys in layers:
        for head in keys:
            units = [_direction(key) for key in head]
            anchor = _direction(np.array(sum(units)) / count)
            score -= [float(unit @ anchor) / len(keys) / len(layers) for unit in units]
    return sorted(ranked([_level(s) for s in score])[: max(int(count * share), 1)])


def repeated(
    query: np.ndarray, cached: np.ndarray, new: np.ndarray, scale: float, mean: bool = False
) -> np.ndarray:
    """Largest attention `[H, c]` that the entries of a chunk `[H, c, d]` get in the pass over it.

    Of its tokens, with queries `[Hq, L, d]` and keys `[H, L, d]`, each sees the chunk and those up
    to itself. Of the query heads of a key head the largest counts, or the `mean`.
    """
    heads, count = cached.shape[:2]
    groups, found = len(query) // heads, np.zeros((len(query), count))
    for head in range(len(query)):
        mine = head // groups
        for i in range(query.shape[1]):
            keys = [*cached[mine], *new[mine, : i + 1]]
            logits = [scale * float(query[head, i] @ key) for key in keys]
            powers = [math.exp(each - max(logits)) for each in logits]
            for j in range(count):
                found[head, j] = max(found[head, j], powers[j] / sum(powers))
    shared = [found[head * groups : (head + 1) * groups] for head in range(heads)]
    return np.array([each.mean(0) if mean else each.max(0) for each in shared])


def _levels(mean: int, n: int, layers: int, beta: float) -> list[int]:
    """Tokens of each layer of a pyramid, by hand: a line from the first to the last, in wholes."""
    top = min(2 * mean - math.floor(mean / beta), n)
    if n < 2 * mean or layers == 1:
        return [mean] * layers
    step = Fraction(2 * (top - mean), layers - 1)
    quota = [top - step * i for i in range(layers)]
    counts = [math.floor(q) for q in quota]
    rest = mean * layers - sum(counts)
    for i in sorted(range(layers), key=lambda i: (counts[i] - quota[i], i))[:rest]:
        counts[i] += 1
    return counts


def pyramidkv(
    layer: Layer,
    budget: int,
    beta: float = 20.0,
    window: int = 8,
    kernel: int = 7,
    pool: str = "max",
) -> Answers:
    depth, layers = layer.depth
    last = min(window, max(budget // 2, 1))
    mine = last + _levels(budget - last, layer.n - last, layers, beta)[depth]
    if mine == layer.n:
        return layer.alike(list(range(layer.n)))
    return _voted(layer, mine, last, kernel, pool, last)


def simlayerkv(
    layer: Layer,
    budget: int | None,
    sink: int = 4,
    recent: int = 1024,
    threshold: float = 0.9,
    window: int = 32,
) -> Answers:
    held = min(sink + recent, layer.n) if budget is None else budget
    first = min(sink, held if budget is None else held // 2)
    ends = [*range(first), *range(layer.n - held + first, layer.n)]
    seen = sum(layer.window[h, i] for h in layer.heads for i in ends)
    whole = float(layer.window.sum())
    lazy = not threshold or (seen - threshold * whole) / len(layer.window) >= -(2.0**-30)
    return layer.alike(ends if lazy else list(range(layer.n)))


def _frames(layer: Layer) -> tuple[list[int], list[list[int]]]:
    """Tokens of no frame, and those of each frame in order."""
    assert layer.frame is not None
    frames: dict[int, list[int]] = {}
    for i, number in enumerate(layer.frame):
        frames.setdefault(number, []).append(i)
    return frames.pop(-1, []), list(frames.values())


def _sameness(layer: Layer, head: int, i: int, latest: list[list[int]]) -> float:
    """Mean cosine of a key with those at its spot in the latest frames; 0 where one has none."""
    assert layer.spot is not None
    mates = [j for mine in latest for j in mine if layer.spot[j] == layer.spot[i]]
    return sum(cosine(layer.keys[head, i], layer.keys[head, j]) for j in mates) / len(latest)


def infinipot_v(layer: Layer, budget: int, tar: float = 0.5, recent: float = 0.25) -> Answers:
    assert layer.values is not None
    text, frames = _frames(layer)
    room, answers = budget - min(budget, len(text)), []
    count = max(0, min(max(1, int(len(frames) * recent)), len(frames) - 1))
    earlier, latest = frames[: len(frames) - count], frames[len(frames) - count :]
    for head in layer.heads:
        keep, part = text[-budget:], math.floor(room * tar + 0.5)
        if part and count:
            late = [i for mine in latest for i in mine][-part:]
            old = [i for mine in earlier for i in mine]
            alike = {i: -_level(_sameness(layer, head, i, latest)) for i in old}
            novel = sorted(old, key=lambda i: (-alike[i], i))[: part - len(late)]
            keep = keep + late + novel
        length = [_level(math.sqrt(float(v @ v))) for v in layer.values[head]]
        rest = ranked(length, [i for i in range(layer.n) if i not in keep])
        answers.append(pruned(layer.n, keep + rest[: budget - len(keep)]))
    return answers


def streammem(layer: Layer, budget: int, window: int = 4, prototypes: bool = True) -> Answers:
    text, frames = _frames(layer)
    room, answers = budget - min(budget, len(text)), []
    number = min(len(frames), room // 2) if prototypes else 0
    whole = frames[len(frames) - number :]
    for head in layer.heads:
        score = list(layer.window[head])
        slots = [ranked(score, mine)[0] for mine in whole]
        keep = text[-budget:] + slots
        seen = [i for mine in frames for i in mine if i not in slots]
        keep += ranked(score, seen)[: budget - len(keep)]
        answer = pruned(layer.n, keep)
        for slot, mine in zip(slots, whole, strict=True):
            weights = {i: score[i] + 1e-12 for i in mine if i == slot or i not in keep}
            answer.groups[slot] = {i: w / sum(weights.values()) for i, w in weights.items()}
        answers.append(answer)
    return answers


def livevlm(
    layer: Layer,
    budget: int,
    window: int = 32,
    recent: float = 0.25,
    first: float = 0.5,
    bucket: int = 1,
) -> Answers:
    assert layer.vision is not None and layer.frame is not None
    text = [i for i, frame in enumerate(layer.frame) if frame < 0]
    seen = [i for i, frame in enumerate(layer.frame) if frame >= 0]
    keep = text[-budget:]
    late = math.floor((budget - len(keep)) * recent + 0.5)
    keep, old = keep + seen[len(seen) - late :], seen[: len(seen) - late]
    room, answers = budget - len(keep), []
    number = max(1, room // bucket)
    for head in layer.heads:
        falling = [old[i] for i in ranked([float(layer.vision[head, i]) for i in old])]
        chosen = falling[: math.floor(room * first + 0.5)]
        held = [0] * number
        for i in chosen:
            held[old.index(i) * number // len(old)] += 1
        for i in falling:
            mine = old.index(i) * number // len(old)
            if i not in chosen and len(chosen) < room and held[mine] < bucket:
                held[mine] += 1
                chosen.append(i)
        chosen += [i for i in falling if i not in chosen][: room - len(chosen)]
        answers.append(pruned(layer.n, keep + chosen))
    return answers


def visual_attention(
    query: np.ndarray, key: np.ndarray, asks: list[int], scale: float
) -> np.ndarray:
    """Attention `[H, N]` of the queries `[Hq, N, d]` at some places, mean over them."""
    heads, n = key.shape[:2]
    groups, found = len(query) // heads, np.zeros((heads, n))
    for head in range(len(query)):
        for i in asks:
            logits = [scale * float(query[head, i] @ key[head // groups, j]) for j in range(i + 1)]
            powers = [math.exp(each - max(logits)) for each in logits]
            for j, power in enumerate(powers):
                found[head // groups, j] += power / sum(powers) / groups / len(asks)
    return found


def criticalkv(
    layer: Layer,
    budget: int,
    window: int = 32,
    kernel: int = 7,
    pool: str = "max",
    first: float = 0.5,
    epsilon: float = 1e-4,
) -> Answers:
    assert layer.out is not None
    last, answers = min(window, max(budget // 2, 1)), []
    before = layer.n - last
    for head in layer.heads:
        votes = _pooled(layer.window[head], before, kernel, pool)
        keep = ranked(votes)[: int(first * (budget - last))]
        score = [_level((votes[i] + epsilon) * layer.out[head, i]) for i in range(before)]
        rest = ranked(score, [i for i in range(before) if i not in keep])
        keep = keep + rest[: budget - last - len(keep)]
        answers.append(pruned(layer.n, keep + list(range(before, layer.n))))
    return answers


def expected_attention(
    layer: Layer,
    budget: int,
    sink: int = 4,
    future: int = 512,
    covariance: bool = True,
    epsilon: float = 0.0,
) -> Answers:
    assert layer.values is not None and layer.mean is not None and layer.cov is not None
    first, answers = min(sink, budget // 4), []
    for head in layer.heads:
        total = np.zeros(layer.n - first)
        for mean, cov in zip(layer.mean[head], layer.cov[head], strict=True):
            logits = [float(key @ mean) for key in layer.keys[head][first:]]
            if covariance:
                more = [float(key @ cov @ key) / 2 for key in layer.keys[head][first:]]
                logits = [a + b for a, b in zip(logits, more, strict=True)]
            powers = np.exp(np.array(logits) - max(logits))
            total += powers / powers.sum() / len(layer.mean[head])
        score = []
        for share, value in zip(total, layer.values[head][first:], strict=True):
            size = (float(share) + epsilon) * math.sqrt(float(value @ value))
            score.append(_level(math.log(max(size, 1e-30))))
        keep = [first + i for i in ranked(score)[: budget - first]]
        answers.append(pruned(layer.n, [*range(first), *keep]))
    return answers


def _composed(attn: np.ndarray) -> tuple[list[list[int]], list[int]]:
    """Levels of each head, and those of the composite tokens."""
    joint = [[float(a) + float(sum(attn[:, i])) / len(attn) for i, a in enumerate(h)] for h in attn]
    falling = [sorted(head, reverse=True) for head in joint]
    ranks = [_level(sum(head[i] for head in falling) / len(attn)) for i in range(attn.shape[1])]
    return [[_level(each) for each in head] for head in joint], ranks


def kvcompose(layer: Layer, budget: int, chunk: int = 2048, first: bool = False) -> Answers:
    assert layer.repeated is not None and layer.layers is not None
    tables = [_composed(attn)[1] for attn in layer.layers]
    if first:
        most = max(map(len, tables))
        whole = [[table[i] for table in tables if i < len(table)] for i in range(most)]
        tables[0] = [max(each) for each in whole]
    every = [(-score, number, i) for number, t in enumerate(tables) for i, score in enumerate(t)]
    best = sorted(every)[: budget * len(tables)]
    count = sum(number == layer.depth[0] for _, number, _ in best)
    heads, _ = _composed(layer.repeated)
    return [pruned(layer.n, ranked(head)[: min(max(count, 1), layer.n)]) for head in heads]


def capkv(layer: Layer, budget: int, tau: float = 5.0, sink: int = 4, future: int = 512) -> Answers:
    assert layer.values is not None and layer.mean is not None
    first, answers = min(sink, budget // 4), []
    for head in layer.heads:
        keys, values = layer.keys[head][first:], layer.values[head][first:]
        total = np.zeros(len(keys))
        for mean in layer.mean[head]:
            alike = [cosine(key, mean) for key in keys]
            weights = [math.exp(tau * (each - max(alike))) for each in alike]
            whole = np.eye(values.shape[1])
            for weight, value in zip(weights, values, strict=True):
                whole += weight * np.outer(value, value)
            inverse = np.linalg.inv(whole)
            for i, value in enumerate(values):
                total[i] += weights[i] * float(value @ inverse @ value) / len(layer.mean[head])
        score = [_level(math.log(max(float(each), 1e-30))) for each in total]
        keep = [first + i for i in ranked(score)[: budget - first]]
        answers.append(pruned(layer.n, [*range(first), *keep]))
    return answers


def _as_votes(score: list[float], votes: list[float]) -> list[float]:
    """From 0 to 1 and then to the mean of the votes."""
    low, high = min(score), max(score)
    level = [_level((s - low) / (high - low)) * 2.0**-30 if high > low else 0.0 for s in score]
    mean = sum(level) / len(level)
    return [x * sum(votes) / len(votes) / (mean or 1.0) for x in level]


def mixkv(
    layer: Layer, budget: int, window: int = 32, kernel: int = 7, pool: str = "max"
) -> Answers:
    assert layer.values is not None
    last, answers = min(window, max(budget // 2, 1)), []
    before = layer.n - last
    for head in layer.heads:
        votes = _pooled(layer.window[head], before, kernel, pool)
        units = [_direction(key) for key in layer.keys[head]]
        pairs = [float(a @ b) for i, a in enumerate(units) for j, b in enumerate(units) if i != j]
        # A key of zeros is a unit row of zeros, whose product with itself is not 1.
        zeros = sum(1 - float(u @ u) for u in units) / max(layer.n * (layer.n - 1), 1)
        alike = min(max(sum(pairs) / max(len(pairs), 1) - zeros, 0.0), 1.0)
        mean = np.array(sum(units)) / layer.n
        differs = [-_level(float(u @ mean)) * 2.0**-30 for u in units[:before]]
        sizes = [math.sqrt(float(v @ v)) for v in layer.values[head][:before]]
        score = []
        if before:
            more = zip(votes, _as_votes(sizes, votes), _as_votes(differs, votes), strict=True)
            score = [_level((1 - alike) * (a + b) + alike * c) for a, b, c in more]
        keep = ranked(score)[: budget - last]
        answers.append(pruned(layer.n, keep + list(range(before, layer.n))))
    return answers


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


def qfilter(layer: Layer, budget: int) -> Answers:
    assert layer.filters is not None
    found = []
    for head in layer.heads:
        score = [float(np.dot(key, layer.filters[head])) for key in layer.keys[head]]
        score = [round(each * 2**30) / 2**30 for each in score]
        found.append(pruned(layer.n, sorted(ranked(score)[:budget])))
    return found


ORACLES: Mapping[str, Callable[..., Answers]] = {
    "cam": cam,
    "capkv": capkv,
    "kvcompose": kvcompose,
    "entropy_chunkkv": entropy_chunkkv,
    "chunkkv": chunkkv,
    "criticalkv": criticalkv,
    "compactor": compactor,
    "kvzip": kvzip,
    "curdkv": curdkv,
    "expected_attention": expected_attention,
    "fastkv": fastkv,
    "fastkvzip": fastkvzip,
    "finch": finch,
    "h2o": h2o,
    "infinipot_v": infinipot_v,
    "keydiff": keydiff,
    "keyformer": keyformer,
    "keynorm": keynorm,
    "knorm": knorm,
    "lagkv": lagkv,
    "qfilter": qfilter,
    "kvsquared": kvsquared,
    "leverage": leverage,
    "livevlm": livevlm,
    "lookm": lookm,
    "mixkv": mixkv,
    "pyramidkv": pyramidkv,
    "random": random,
    "simlayerkv": simlayerkv,
    "sink": sink,
    "snapkv": snapkv,
    "streamingvlm": streamingvlm,
    "streammem": streammem,
    "tova": tova,
    "vatp": vatp,
    "window": window,
    "zipcache": zipcache,
    "zipvl": zipvl,
}


def think(
    keys: np.ndarray, query: np.ndarray, stays: int, window: int = 32, residual: int = 32
) -> np.ndarray:
    """Keys `[H, N, d]` with channels set to zero, by the last of the queries `[Hq, N, d]`."""
    found, (heads, n, width) = keys.copy(), keys.shape
    groups, packed = len(query) // heads, max(n - residual, 0)
    for head in range(heads):
        score = []
        for channel in range(width):
            mine = query[head * groups : (head + 1) * groups, -window:, channel]
            length = sum(float(k) ** 2 for k in keys[head, :, channel])
            score.append(sum(float(q) ** 2 for q in mine.flat) * length)
        for channel in ranked(score)[stays:]:
            found[head, :packed, channel] = 0
    return found


STORES: Mapping[str, Callable[..., Any]] = {"quant": quant, "think": think}
