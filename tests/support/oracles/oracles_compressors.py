"""Slow, obvious versions of the learned compressors: loops over frames, queries, heads, patches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Weights = Mapping[str, Array]


def softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return [power / sum(powers) for power in powers]


def gelu(value: float) -> float:
    return 0.5 * value * (1 + math.erf(value / math.sqrt(2)))


def norm(x: Array, weights: Weights, name: str) -> Array:
    gap = x - x.mean()
    scaled = gap / math.sqrt((gap**2).mean() + 1e-5)
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Array, weights: Weights, name: str) -> Array:
    out = weights[f"{name}.weight"] @ x
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def attend(query: Array, keys: list[Array], weights: Weights, name: str, heads: int) -> Array:
    """One query over the given keys, head by head."""
    q = linear(query, weights, f"{name}.q")
    width = len(q) // heads
    parts = []
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        scores = [
            float(q[part] @ linear(key, weights, f"{name}.k")[part]) / math.sqrt(width)
            for key in keys
        ]
        mixed = np.zeros(width)
        for share, key in zip(softmax(scores), keys, strict=True):
            mixed += share * linear(key, weights, f"{name}.v")[part]
        parts.append(mixed)
    return linear(np.concatenate(parts), weights, f"{name}.o")


def spot(row: float, column: float, width: int) -> Array:
    """Sines and cosines of a place, rows first."""
    rates = [100.0 ** (-i / (width // 4)) for i in range(width // 4)]
    found: list[float] = []
    for place in (row, column):
        found += [math.sin(place * rate) for rate in rates]
        found += [math.cos(place * rate) for rate in rates]
    return np.array(found)


def layer(patches: list[Array], weights: Weights, name: str, heads: int) -> list[Array]:
    """A transformer layer over the patches of one frame."""
    seen = [norm(patch, weights, f"{name}.before") for patch in patches]
    out = []
    for patch, own in zip(patches, seen, strict=True):
        z = patch + attend(own, seen, weights, f"{name}.look", heads)
        hidden = linear(norm(z, weights, f"{name}.between"), weights, f"{name}.wide")
        out.append(z + linear(np.array([gelu(v) for v in hidden]), weights, f"{name}.narrow"))
    return out


def query_compressor(
    weights: Weights, config: Mapping[str, Any], cells: list[list[int]], x: Array, text: Array
) -> tuple[Array, list[list[int]]]:
    """Outputs `[F, k, D]` and their places, for cells given as lists of patches."""
    columns, inner, heads = config["grid"][1], config["inner"], config["heads"]
    listened = np.zeros(inner)
    if config["asks"]:
        read = [linear(norm(word, weights, "read.0"), weights, "read.1") for word in text]
        listened = attend(weights["ask"][0], read, weights, "listen", heads)
    asked: list[list[Array]] = []  # the queries of each frame
    known: list[list[Array]] = []  # its patches
    for moment, frame in enumerate(x):
        time = weights["time.weight"] @ spot(moment, 0, inner)
        inside = [linear(norm(patch, weights, "enter.0"), weights, "enter.1") for patch in frame]
        keys = [inside[p] + spot(p // columns, p % columns, inner) for p in range(len(frame))]
        for number in range(config["depth"]):
            keys = layer(keys, weights, f"layers.{number}", heads)
        mine = []
        for number, cell in enumerate(cells):
            z = sum(inside[p] for p in cell) / len(cell) + weights["learned"][number] + listened
            z = z + time
            own = [keys[p] for p in cell]
            mine.append(z + attend(norm(z, weights, "before"), own, weights, "look", heads))
        asked.append(mine)
        known.append(keys)
    every = [norm(z, weights, "ahead") for mine in asked for z in mine]
    frames, places = [], []
    for frame, mine, keys in zip(x, asked, known, strict=True):
        found = []
        for z, cell in zip(mine, cells, strict=True):
            z = z + attend(norm(z, weights, "ahead"), every, weights, "mix", heads)
            hidden = linear(norm(z, weights, "between"), weights, "wide")
            z = z + linear(np.array([gelu(v) for v in hidden]), weights, "narrow")
            z = norm(z, weights, "behind")
            chosen = linear(z, weights, "choose")
            scores = [
                float(chosen @ linear(keys[p], weights, "offer")) / math.sqrt(inner) for p in cell
            ]
            vector = linear(z, weights, "change")
            for share, p in zip(softmax(scores), cell, strict=True):
                vector = vector + share * frame[p]
            found.append((cell[scores.index(max(scores))], vector))
        found.sort(key=lambda pair: pair[0])
        places.append([place for place, _ in found])
        frames.append(np.stack([vector for _, vector in found]))
    return np.stack(frames), places


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def mamba(sequence: list[Array], weights: Weights, name: str) -> list[Array]:
    """The plain recurrence of a selective state space, token by token, channel by channel."""
    own = {key.removeprefix(name): value for key, value in weights.items() if key.startswith(name)}
    wide, states = own["A_log"].shape
    rank, kernel = own["dt_proj.weight"].shape[1], own["conv1d.weight"].shape[-1]
    entered = [linear(x, own, "in_proj") for x in sequence]
    h, out = np.zeros((wide, states)), []
    for now in range(len(sequence)):
        u = own["conv1d.bias"].copy()
        for ago in range(min(kernel, now + 1)):
            u += own["conv1d.weight"][:, 0, kernel - 1 - ago] * entered[now - ago][:wide]
        u = np.array([silu(value) for value in u])
        read = linear(u, own, "x_proj")
        raw = linear(read[:rank], own, "dt_proj")
        enter, leave = read[rank : rank + states], read[rank + states :]
        y = np.zeros(wide)
        for c in range(wide):
            step = math.log1p(math.exp(raw[c]))
            for s in range(states):
                decay = math.exp(-step * math.exp(own["A_log"][c, s]))
                h[c, s] = decay * h[c, s] + step * enter[s] * u[c]
                y[c] += h[c, s] * leave[s]
            y[c] = (y[c] + own["D"][c] * u[c]) * silu(entered[now][wide + c])
        out.append(linear(y, own, "out_proj"))
    return out


def storm(
    weights: Weights, config: Mapping[str, Any], cells: list[list[list[int]]], x: Array
) -> list[list[tuple[int, Array]]]:
    """Place and vector of each output of each frame; `cells` are those of 1, 2 … frames."""
    columns, tokens, stride = config["grid"][1], config["tokens"], config["stride"]
    frames, patches = x.shape[:2]
    sequence = []
    for frame in x:
        for p in range(patches):
            inside = linear(norm(frame[p], weights, "enter.0"), weights, "enter.1")
            sequence.append(inside + spot(p // columns, p % columns, len(inside)))
    for number in range(config["depth"]):
        seen = [norm(z, weights, f"before.{number}") for z in sequence]
        ahead = mamba(seen, weights, f"ahead.{number}.")
        back = mamba(seen[::-1], weights, f"back.{number}.")[::-1]
        sequence = [z + a + b for z, a, b in zip(sequence, ahead, back, strict=True)]
    told = [norm(z, weights, "behind") for z in sequence]
    out: list[list[tuple[int, Array]]] = []
    for start in range(0, frames, stride):
        group = range(start, min(start + stride, frames))
        for turn in range(len(group)):
            mine = []
            for cell in cells[len(group) - 1][turn * tokens : (turn + 1) * tokens]:
                spots = [(f, p) for f in group for p in cell]
                mean = sum(x[f, p] for f, p in spots) / len(spots)
                state = sum(told[f * patches + p] for f, p in spots) / len(spots)
                middle = np.mean([(p // columns, p % columns) for p in cell], 0)
                far = [math.dist(middle, (p // columns, p % columns)) for p in cell]
                near = cell[next(i for i, d in enumerate(far) if d <= min(far) + 1e-12)]
                mine.append((near, mean + linear(state, weights, "change")))
            out.append(sorted(mine, key=lambda pair: pair[0]))
    return out


def root_norm(x: Array, weights: Weights, name: str) -> Array:
    return x / math.sqrt((x**2).mean() + 1e-6) * weights[f"{name}.weight"]


def rotary(x: Array, place: int) -> Array:
    """One head turned by its place: number i goes with number i + half."""
    half, out = len(x) // 2, np.zeros(len(x))
    for i in range(half):
        angle = place * 10000.0 ** (-i / half)
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def decoder_block(sequence: list[Array], weights: Weights, name: str, heads: int) -> list[Array]:
    """A block of a causal language model over one sequence, head by head and token by token."""
    seen = [root_norm(x, weights, f"{name}.before") for x in sequence]
    q, k, v = ([linear(x, weights, f"{name}.{part}") for x in seen] for part in "qkv")
    width, out = len(q[0]) // heads, []
    for now, x in enumerate(sequence):
        parts = []
        for head in range(heads):
            part = slice(head * width, (head + 1) * width)
            mine = rotary(q[now][part], now)
            scores = [
                float(mine @ rotary(k[at][part], at)) / math.sqrt(width) for at in range(now + 1)
            ]
            shares = softmax(scores)
            parts.append(sum(s * v[at][part] for at, s in enumerate(shares)))
        z = x + linear(np.concatenate(parts), weights, f"{name}.o")
        inside = root_norm(z, weights, f"{name}.between")
        gate = np.array([silu(value) for value in linear(inside, weights, f"{name}.gate")])
        out.append(
            z + linear(gate * linear(inside, weights, f"{name}.up"), weights, f"{name}.down")
        )
    return out


def llava_mini(
    weights: Weights, config: Mapping[str, Any], x: Array, text: Array
) -> tuple[Array, Array]:
    """Vectors `[F, k, D]`, and the change `[T, D]` of a text without padding."""
    rows, columns = config["grid"]
    inner, side = config["inner"], math.isqrt(config["tokens"])
    ends = [[i * n // side for i in range(side + 1)] for n in (rows, columns)]
    middles = [[(end[i] + end[i + 1] - 1) / 2 for i in range(side)] for end in ends]
    frames, changes = [], []
    for frame in x:
        keys = [
            linear(root_norm(patch, weights, "enter.0"), weights, "enter.1")
            + spot(p // columns, p % columns, inner)
            for p, patch in enumerate(frame)
        ]
        found = []
        for number in range(side * side):
            middle = (middles[0][number // side], middles[1][number % side])
            query = weights["learned"][number] + spot(*middle, inner)
            asked = linear(query, weights, "choose")
            scores = [
                float(asked @ linear(key, weights, "offer")) / math.sqrt(inner) for key in keys
            ]
            found.append(sum(s * patch for s, patch in zip(softmax(scores), frame, strict=True)))
        frames.append(np.stack(found))
        sequence = [
            linear(root_norm(each, weights, "read.0"), weights, "read.1")
            for each in (*frame, *text)
        ]
        for number in range(config["depth"]):
            sequence = decoder_block(sequence, weights, f"layers.{number}", config["heads"])
        told = [root_norm(z, weights, "behind") for z in sequence[len(frame) :]]
        changes.append(np.stack([linear(z, weights, "fuse") for z in told]))
    return np.stack(frames), np.mean(changes, 0)
