"""The authors' cache policies, as tests/golden/README.md words them: the second oracle.

Slow loops in float64 from the `in.*` arrays and parameters of a golden file to its `out.*` arrays.
They share no code with the package or with the drivers, and evaluate attention themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from oracle_base import cosine, ranked

Arrays = Mapping[str, np.ndarray]
Params = Mapping[str, Any]
Results = dict[str, np.ndarray]
Rows = Sequence[np.ndarray]


def softmax(logits: list[float]) -> list[float]:
    powers = [math.exp(x - max(logits)) for x in logits]
    return [power / sum(powers) for power in powers]


def received(
    query: Rows, keys: Rows, places: Sequence[int], held: Sequence[int] | None = None
) -> list[float]:
    """Attention that each key gets from the queries at `places`, which see keys up to their own."""
    sums = [0.0] * len(keys)
    numbers = range(len(keys)) if held is None else held
    for place in places:
        seen = [i for i, number in enumerate(numbers) if number <= place]
        scale = math.sqrt(len(keys[0]))
        shares = softmax([float(np.dot(query[place], keys[i])) / scale for i in seen])
        for i, share in zip(seen, shares, strict=True):
            sums[i] += share
    return sums


def window_scores(query: Rows, keys: Rows, p: Params) -> list[float]:
    """Pooled votes of the last queries for the tokens before the window."""
    n, size = len(keys), p["window_size"]
    return pooled(received(query, keys, range(n - size, n))[: n - size], p)


def pooled(votes: Sequence[float], p: Params) -> list[float]:
    side, found = p["kernel_size"] // 2, []
    for i in range(len(votes)):
        near = [votes[j] for j in range(i - side, i + side + 1) if 0 <= j < len(votes)]
        found.append(max(near) if p["pooling"] == "maxpool" else sum(near) / p["kernel_size"])
    return found


def doubles(array: np.ndarray) -> np.ndarray:
    return array.astype(float)


def snapkv(a: Arrays, p: Params) -> Results:
    kept = []
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        chosen = ranked(window_scores(query, keys, p))[
            : p["max_capacity_prompt"] - p["window_size"]
        ]
        kept.append(sorted(chosen) + list(range(len(keys) - p["window_size"], len(keys))))
    return {"kept": np.array(kept)}


def h2o(a: Arrays, p: Params) -> Results:
    heavy, recent, n = p["hh_size"], p["recent_size"], p["prompt"]
    heads = []
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        held, steps = list(range(n)), []
        sums = dict(enumerate(received(query[:n], keys[:n], range(n))))
        for place in range(n, len(keys) + 1):
            before = held[: len(held) - recent]
            first = ranked([sums[i] for i in before])[:heavy]
            held = [before[i] for i in sorted(first)] + held[len(held) - recent :]
            steps.append(list(held))
            if place < len(keys):
                held.append(place)
                sums[place] = 0.0
                got = received(query, [keys[i] for i in held], [place], held)
                for i, share in zip(held, got, strict=True):
                    sums[i] += share
        heads.append(steps)
    return {"kept": np.array(heads).transpose(1, 0, 2)}


def pyramidkv(a: Arrays, p: Params) -> Results:
    layers, _, n, _ = a["keys"].shape
    window = p["window_size"]
    mean = p["max_capacity_prompt"] - window
    low = int(mean // p["beta"])
    high = 2 * mean - low
    if high >= n - window:
        high = n - window
        low = 2 * mean - high
    step = (high - low) // (layers - 1)
    counts, kept = [], []
    for layer, (query, keys) in enumerate(zip(a["query"], a["keys"], strict=True)):
        budget = mean if n < 2 * mean else high - layer * step
        rule = {**p, "max_capacity_prompt": budget + window}
        kept.append(snapkv({"query": query, "keys": keys}, rule)["kept"])
        counts.append(budget + window)
    return {"counts": np.array(counts), "kept": np.concatenate(kept, 1)}


def adakv(a: Arrays, p: Params) -> Results:
    keys, mean = doubles(a["keys"]), p["base_capacity"] - p["window_size"]
    heads, n, _ = keys.shape
    group = len(a["query"]) // heads
    scores = []
    for head in range(heads):
        mine = doubles(a["query"])[head * group : (head + 1) * group]
        scores.append(np.mean([window_scores(query, keys[head], p) for query in mine], 0).tolist())
    flat = [(score, head) for head, row in enumerate(scores) for score in row]
    best = [flat[i][1] for i in ranked([score for score, _ in flat])[: mean * heads]]
    marks = np.zeros((heads, n), bool)
    for head, row in enumerate(scores):
        share = best.count(head) * (1 - p["floor_alpha"]) + int(mean * p["floor_alpha"])
        marks[head, ranked(row)[: round(share)]] = True
        marks[head, n - p["window_size"] :] = True
    return {"kept": marks}


def quest(a: Arrays, p: Params) -> Results:
    page, n = p["chunk_size"], a["keys"].shape[1]
    bounds, read = [], np.zeros(a["keys"].shape[:2], bool)
    for head, (query, keys) in enumerate(zip(doubles(a["query"]), doubles(a["keys"]), strict=True)):
        most = []
        for first in range(0, n, page):
            rows = keys[first : first + page]
            pairs = zip(query[0], rows.max(0), rows.min(0), strict=True)
            most.append(sum(max(q * high, q * low) for q, high, low in pairs))
        for number in ranked(most)[: max(3, p["token_budget"] // page)]:
            read[head, number * page : (number + 1) * page] = True
        bounds.append(most[: (n - 1) // page])
    return {"bounds": np.array(bounds), "read": read}


def tidaldecode(a: Arrays, p: Params) -> Results:
    layers, heads, n, _ = a["keys"].shape
    read, out = np.ones((layers, heads, n), bool), np.zeros((layers, heads, a["values"].shape[-1]))
    start = p["sparse_layer_start"]
    for head in range(heads):
        chosen: list[int] = []
        for layer in range(layers):
            query, keys = doubles(a["query"])[layer, head, 0], doubles(a["keys"])[layer, head]
            logits = [float(query @ key) / math.sqrt(len(query)) for key in keys]
            everything = layer <= start or layer == p["correction_layer"]
            seen = list(range(n)) if everything else chosen
            if layer in (start, p["correction_layer"]):
                chosen = sorted(ranked(logits)[: p["top_k"]])
            read[layer, head] = np.isin(np.arange(n), seen)
            shares = softmax([logits[i] for i in seen])
            values = doubles(a["values"])[layer, head]
            out[layer, head] = sum(s * values[i] for s, i in zip(shares, seen, strict=True))
    return {"read": read, "out": out}


def _groups(row: np.ndarray, size: int, bits: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Smallest numbers, distances of codes and codes of a row of numbers, by float32 as there."""
    lows, steps, codes = [], [], []
    for first in range(0, len(row), size):
        part = row[first : first + size]
        low, step = part.min(), (part.max() - part.min()) / np.float32(2**bits - 1)
        lows.append(low)
        steps.append(step)
        codes += [round(float((x - low) / step)) for x in part]
    return lows, steps, codes


def quant(a: Arrays, p: Params) -> Results:
    found: dict[str, Any] = {}
    for name, along in (("key", 1), ("value", 2)):
        rows = np.moveaxis(a[f"{name}s"], along, -1)
        parts = [[_groups(row, p["group_size"], p["bits"]) for row in head] for head in rows]
        for number, part in enumerate(("low", "scale", "codes")):
            table = np.array([[row[number] for row in head] for head in parts])
            kind = np.uint8 if part == "codes" else np.float32
            found[f"{name}_{part}"] = np.moveaxis(table.astype(kind), -1, along)
    return found


def keyformer(a: Arrays, p: Params) -> Results:
    n = p["prompt"]
    total = int(n * p["kv_cache"] / 100)
    recent = int(total * p["recent"] / 100)
    chosen = []
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        score = received(query[:n], keys[:n], range(n))[: n - recent]
        chosen.append(sorted(ranked(score)[: total - recent]))
    return {"chosen": np.array(chosen)}


def lookm(a: Arrays, p: Params) -> Results:
    n, size = a["keys"].shape[1], p["image_tokens"]
    starts = [place + i * (size - 1) for i, place in enumerate(p["image_position"])]
    image = [any(first <= i < first + size for first in starts) for i in range(n)]
    before = range(n - p["recent_size"])
    found: dict[str, list[Any]] = {"kept": [], "keys": [], "values": []}
    for head, (query, keys) in enumerate(zip(doubles(a["query"]), doubles(a["keys"]), strict=True)):
        score = received(query, keys, range(n))
        words = [i for i in before if not image[i]]
        heavy = ranked(score, [i for i in before if image[i]])[: p["hh_size"] - len(words)]
        kept = sorted(words + heavy) + list(range(n - p["recent_size"], n))
        pivot = {
            i: max(kept, key=lambda k, i=i, keys=keys: cosine(keys[i], keys[k]))
            for i in range(n)
            if i not in kept
        }
        found["kept"].append(kept)
        for name in ("keys", "values"):
            rows = doubles(a[name])[head]
            halves = {
                k: [(rows[i] + rows[k]) / 2 for i, to in pivot.items() if to == k] for k in kept
            }
            found[name].append([np.mean([rows[k], *halves[k]], 0) for k in kept])
    return {name: np.array(rows) for name, rows in found.items()}


def simlayerkv(a: Arrays, p: Params) -> Results:
    counts, kept = [], []
    n, group = a["keys"].shape[2], a["query"].shape[1] // a["keys"].shape[1]
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        ends = list(range(p["sink"])) + list(range(n - p["recent"], n))
        held = []
        for head, row in enumerate(query[:, 0]):
            mine = keys[head // group]
            shares = softmax([float(row @ key) / math.sqrt(len(row)) for key in mine])
            held.append(sum(shares[i] for i in ends))
        stays = ends if sum(held) / len(held) > p["threshold"] else list(range(n))
        counts.append(len(stays))
        kept += stays
    return {"counts": np.array(counts), "kept": np.array(kept)}


def think(a: Arrays, p: Params) -> Results:
    heads, n, width = a["keys"].shape
    marks, found = np.ones((heads, width), bool), doubles(a["keys"])
    for head in range(heads):
        score = []
        for channel in range(width):
            asked = sum(float(q) ** 2 for q in a["query"][head, -32:, channel])
            score.append(-asked * sum(float(k) ** 2 for k in a["keys"][head, :, channel]))
        for channel in ranked(score)[: int(width * p["ratio"])]:
            marks[head, channel] = False
            found[head, : n - p["recent_size"], channel] = 0
    return {"channels": marks, "keys": found}


def infinipot_v(a: Arrays, p: Params) -> Results:
    first, size = p["system_size"], p["token_per_frame"]
    frames = (a["keys"].shape[1] - first) // size
    late, budget = int(frames * p["query_ratio"]), p["compress_frame_num"] * size
    part = budget - round((1 - p["tar_ratio"]) * budget)
    kept = []
    for keys, values in zip(doubles(a["keys"]), doubles(a["values"]), strict=True):
        chosen, rest = [], list(range((frames - late) * size))
        if part:
            chosen = list(range((frames - late) * size, frames * size))
            alike = [
                np.mean(
                    [cosine(keys[first + i], keys[first + j]) for j in chosen[i % size :: size]]
                )
                for i in rest
            ]
            chosen += ranked([-float(x) for x in alike])[: part - len(chosen)]
        length = [math.sqrt(float(v @ v)) for v in values[first:]]
        free = [i for i in range(frames * size) if i not in chosen]
        chosen += ranked(length, free)[: budget - len(chosen)]
        kept.append(list(range(first)) + [first + i for i in sorted(chosen)])
    return {"kept": np.array(kept)}


def lagkv(a: Arrays, p: Params) -> Results:
    n, size, first = a["keys"].shape[1], p["lag_size"], p["sink_size"]
    parts, kept = (n - first) // size, []
    for both in zip(doubles(a["keys"]), doubles(a["values"]), strict=True):
        mine = list(range(first)) + list(range(first + (parts - 1) * size, n))
        for part in range(parts - 1):
            here, score = range(first + part * size, first + (part + 1) * size), [0.0] * size
            for rows in both:
                behind = rows[here.stop : here.stop + size]
                low, span = behind.min(0), behind.max(0) - behind.min(0)
                spread = softmax([float(((rows[i] - low) / span).std(ddof=1)) for i in here])
                score = [x + y for x, y in zip(score, spread, strict=True)]
            mine += [here.start + i for i in ranked(score)[: int(p["ratio"] * size)]]
        kept.append(sorted(mine))
    return {"kept": np.array(kept)}


def zipcache(a: Arrays, p: Params) -> Results:
    keys = doubles(a["keys"])[0]
    n = len(keys)
    sums = np.sum([received(query, keys, range(n)) for query in doubles(a["query"])], 0)
    gone = ranked([-sums[i] / (n - i) for i in range(n)])[: int(p["k_unimportant_ratio"] * n)]
    return {"kept": np.array([i for i in range(n) if i not in gone])}


def mixkv(a: Arrays, p: Params) -> Results:
    queries, size, kept = doubles(a["query"]), p["window_size"], []
    group = len(queries) // len(a["keys"])
    for head, keys in enumerate(doubles(a["keys"])):
        n = len(keys)
        mine = [received(q, keys, range(n - size, n)) for q in queries[head * group :][:group]]
        votes = pooled((np.mean(mine, 0) / size)[: n - size].tolist(), p)
        units = [key / math.sqrt(float(key @ key)) for key in keys]
        mean = sum(units) / n
        alike = (n * float(mean @ mean) - 1) / (n - 1)
        lengths = [math.sqrt(float(v @ v)) for v in doubles(a["values"])[head, : n - size]]
        scores = []
        for other in (lengths, [-float(unit @ mean) for unit in units[: n - size]]):
            level = [(x - min(other)) / (max(other) - min(other)) for x in other]
            scores.append([x * sum(votes) / sum(level) for x in level])
        both = [
            (1 - alike) * (vote + length) + alike * unlike
            for vote, length, unlike in zip(votes, *scores, strict=True)
        ]
        chosen = sorted(ranked(both)[: p["max_capacity_prompt"] - size])
        kept.append(chosen + list(range(n - size, n)))
    return {"kept": np.array(kept)}


def cam(a: Arrays, p: Params) -> Results:
    start, recent, parts = p["start_budget"], p["recent_budget"], p["merge_budget"]
    values, (heads, n, width) = doubles(a["values"]), a["keys"].shape
    steps = a["query"].shape[1]
    for head, (query, keys) in enumerate(zip(doubles(a["query"]), doubles(a["keys"]), strict=True)):
        for step, row in enumerate(query):
            count = n - steps + 1 + step
            goes, behind = count - recent + 1, range(count - recent + 2, count)
            share = {i: math.exp(float(row @ keys[i]) / math.sqrt(width)) for i in (goes, *behind)}
            chance = min(1, share[goes] * len(behind) / sum(share[i] for i in behind))
            for i in behind[:parts]:
                values[head, i] += chance * values[head, goes] / parts
    kept = [*range(start), *range(n - recent + 2, n)]
    return {"kept": np.array([kept] * heads), "values": values[:, kept]}


def fastkvzip(a: Arrays, p: Params) -> Results:
    sinks, bias = doubles(a["sinks"])[:, 0], doubles(a["bias"])[:, 0]
    (heads, groups), rank, n = bias.shape, sinks.shape[-1], len(a["states"])

    def normed(row: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return row / math.sqrt(float(row @ row) / rank + 1e-6) * scale

    scores = np.zeros((heads, n))
    for i, state in enumerate(doubles(a["states"])):
        queries = (doubles(a["query"]) @ state + a["query_bias"]).reshape(heads, groups, rank)
        keys = (doubles(a["key"]) @ state).reshape(heads, rank)
        for head, group in np.ndindex(heads, groups):
            query = normed(queries[head, group], a["query_norm"])
            own = float(query @ normed(keys[head], a["key_norm"])) / math.sqrt(rank)
            logits = [own + bias[head, group], *(sinks[head] @ query / math.sqrt(rank))]
            scores[head, i] += softmax(logits)[0] / groups
    first, last = p["sink"], n - p["window_size"]
    kept = []
    for row in scores:
        order = [*range(last, n), *ranked(list(row), list(range(first, last)))]
        kept.append([*range(first), *sorted(order[: int((n - first) * p["ratio"])])])
    return {"scores": scores, "kept": np.array(kept)}


def pbs(a: Arrays, p: Params) -> Results:
    size, wide, orders, found = p["block_size"], p["segment_size"], [], []
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        n, scale = len(keys), math.sqrt(keys.shape[1])
        whole = n // wide * wide
        last = [softmax([float(q @ key) / scale for key in keys[:whole]]) for q in query[-size:]]
        score, order = np.sum(last, 0).tolist(), list[int]()
        for start in range(0, whole, wide):
            order += ranked(score, list(range(start, start + wide)))
        order += range(whole, n)
        rows, means = ([b.mean(0) for b in _blocks(x, size)] for x in (query, keys[order]))
        marks = np.zeros((len(rows), len(means)), bool)
        for r, row in enumerate(rows):
            before = r * size // wide * wide // size  # blocks of earlier segments
            marks[r, before : before + wide // size] = marks[r, order.index(0) // size] = True
            shares = softmax([float(row @ m) / scale for m in means[:before]]) if before else []
            total = 0.0
            for c in ranked(shares):
                marks[r, c] |= total < p["threshold"]
                total += shares[c]
        orders.append(order)
        found.append(marks)
    return {"order": np.array(orders), "blocks": np.array(found)}


def keynorm(a: Arrays, p: Params) -> Results:
    keys, size, kept = doubles(a["keys"]), p["group"], []
    for first in range(0, keys.shape[1], size):
        lengths = [float((keys[:, i] ** 2).sum()) for i in range(first, first + size)]
        shortest = ranked([-length for length in lengths])[: int(size * p["top_p"])]
        kept += sorted(first + i for i in shortest)
    return {"kept": np.array(kept)}


def vatp(a: Arrays, p: Params) -> Results:
    n, sink = a["keys"].shape[1], p["sink_len"]
    recent, heavy = int(p["recent_ratio"] * n), int(p["heavy_ratio"] * n)
    marks = np.zeros(a["keys"].shape[:2], bool)
    marks[:, n - recent :] = True
    rows = (doubles(a[name]) for name in ("query", "keys", "values"))
    for mark, (query, keys, values) in zip(marks, zip(*rows, strict=True), strict=True):
        sums = received(query, keys, range(n))
        score = [s * float(np.abs(v).sum()) for s, v in zip(sums, values, strict=True)]
        score[:sink] = [math.inf] * sink
        mark[ranked(score[: n - recent])[:heavy]] = True
    return {"kept": marks}


def tokenselect(a: Arrays, p: Params) -> Results:
    n = a["keys"].shape[1]
    rest, votes = range(p["n_init"], n - p["n_local"]), [0.0] * n
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        shares = softmax([float(query[0] @ keys[i]) for i in rest])
        for i, share in zip(rest, shares, strict=True):
            votes[i] += share
    read = np.ones(n, bool)
    read[rest.start : rest.stop] = False
    read[ranked(votes, list(rest))[: p["topk"]]] = True
    return {"read": read}


def sentencekv(a: Arrays, p: Params) -> Results:
    heads, n, width = a["keys"].shape
    size = p["sentence_tokens"]
    means, read = np.zeros((heads, n // size, width)), np.zeros((heads, n), bool)
    for head, (query, keys) in enumerate(zip(doubles(a["query"]), doubles(a["keys"]), strict=True)):
        means[head] = [keys[i : i + size].mean(0) for i in range(0, n, size)]
        order = ranked([float(query.mean(0) @ mean) for mean in means[head]])
        places = [number * size + i for number in order for i in range(size)]
        read[head, places[: p["budget"]]] = True
    return {"means": means, "read": read}


def rekv(a: Arrays, p: Params) -> Results:
    query, means, size = doubles(a["query"]).mean(1), doubles(a["means"]), p["chunk_size"]
    group = len(query) // means.shape[1]
    score = [
        sum(float(row @ block[head // group]) for head, row in enumerate(query)) for block in means
    ]
    chunks = [score[i : i + size] for i in range(0, len(score), size)]
    best = ranked([sum(chunk) / len(chunk) for chunk in chunks])[: p["topk"] // size]
    return {"read": np.array([i // size in best for i in range(len(score))])}


def _blocks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[i : i + size] for i in range(0, len(rows), size)]


def vertical_slash(a: Arrays, p: Params) -> Results:
    heads, n, width = a["keys"].shape
    columns, slashes = np.zeros((heads, n), bool), np.zeros((heads, n), bool)
    for head, (query, keys) in enumerate(zip(doubles(a["query"]), doubles(a["keys"]), strict=True)):
        down, across = [0.0] * n, [0.0] * n
        for place in range(n - 64, n):
            logits = [float(query[place] @ key) / math.sqrt(width) for key in keys[: place + 1]]
            for j, share in enumerate(softmax(logits)):
                down[j] += share
                across[place - j] += share
        down[:30], across[:100] = [math.inf] * 30, [math.inf] * 100
        columns[head, ranked(down)[: p["vertical_size"]]] = True
        slashes[head, ranked(across)[: p["slash_size"]]] = True
    return {"columns": columns, "slashes": slashes}


def minference(a: Arrays, p: Params) -> Results:
    if "slash_size" in p:
        return vertical_slash(a, p)
    found = []
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        pair = [_blocks(x, p["block_size"]) for x in (query, keys)]
        rows, means = ([block.mean(0) for block in blocks] for blocks in pair)
        marks = np.zeros((len(rows), len(means)), bool)
        for i, row in enumerate(rows):
            best = ranked([float(row @ mean) for mean in means[: i + 1]])[: p["top_k"]]
            marks[i, [j for j in best if j != i]] = True
        found.append(marks)
    return {"blocks": np.array(found)}


def flexprefill(a: Arrays, p: Params) -> Results:
    size, distances, shares = p["block_size"], [], []
    for query, keys in zip(doubles(a["query"]), doubles(a["keys"]), strict=True):
        n, scale = len(keys), math.sqrt(keys.shape[1])
        got = np.array(received(query, keys, range(n - size, n))) / size
        true = [float(x.sum()) for x in _blocks(got, size)]
        means = [x.mean(0) for x in _blocks(keys, size)]
        guess = softmax([float(query[-size:].mean(0) @ mean) / scale for mean in means])
        both = [(x, g, (x + g) / 2) for x, g in zip(true, guess, strict=True)]
        halves = [x * math.log(x / m) + g * math.log(g / m) for x, g, m in both]
        distances.append(math.sqrt(sum(halves) / 2))
        if distances[-1] < p["tau"]:
            table = np.zeros((len(means), len(means)))
            for i, rows in enumerate(_blocks(query, size)):
                row = rows.mean(0)
                table[i, : i + 1] = softmax([float(row @ m) / scale for m in means[: i + 1]])
            shares.append(table)
    distance = np.array(distances)
    return {"distance": distance, "trusted": distance < p["tau"], "shares": np.array(shares)}


def duo_attention(a: Arrays, p: Params) -> Results:
    layers, heads = a["gates"].shape
    gates = a["gates"].flatten().tolist()
    full = ranked(gates)[: round(len(gates) * (1 - p["sparsity"]))]
    kept = np.zeros((layers, heads, p["tokens"]), bool)
    for number in range(len(gates)):
        for i in range(p["tokens"]):
            near = i < p["sink_size"] or i >= p["tokens"] - p["recent_size"]
            kept[number // heads, number % heads, i] = near or number in full
    return {"kept": kept}


POLICIES: Mapping[str, Callable[[Arrays, Params], Results]] = {
    function.__name__: function
    for function in (
        adakv, cam, duo_attention, fastkvzip, flexprefill, h2o, infinipot_v, keyformer, keynorm,
        lagkv, lookm, minference, mixkv, pbs, pyramidkv, quant, quest, rekv, sentencekv,
        simlayerkv, snapkv, think, tidaldecode, tokenselect, vatp, zipcache,
    )
}  # fmt: skip
