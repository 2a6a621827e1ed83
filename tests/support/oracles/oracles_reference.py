"""The authors' reference implementations, defects included, as tests/golden/README.md words them.

Slow loops in float64 from the `in.*` arrays and parameters of a golden file to its `out.*` arrays.
They share no code with the package, reproduce the recorded files, and so can say what a reference
does in cases that were not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import oracles
import oracles_compose
import oracles_llm
import oracles_video
from oracle_base import Item, cosine, ranked

Arrays = Mapping[str, np.ndarray]
Params = Mapping[str, Any]
Results = dict[str, np.ndarray]


def unit(row: np.ndarray) -> np.ndarray:
    length = math.sqrt(float(row @ row))
    return row / length if length else row


def listed(masks: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.flatnonzero(mask) for mask in masks]).astype(np.int64)


def divprune(a: Arrays, p: Params) -> Results:
    x = np.array([unit(row) for row in a["x"].astype(float)])
    far = 1 - x @ x.T
    picks: list[int] = []
    while len(picks) < round(p["ratio"] * len(x)):
        if picks:
            score = [min(far[i, j] for i in picks) for j in range(len(x))]
        else:
            score = [sorted(far[:, j])[1] for j in range(len(x))]
        picks.append(ranked([round(s, 12) for s in score])[0])
    return {"indices": np.array(picks, np.int64)}


def visionzip(a: Arrays, p: Params) -> Results:
    found: dict[str, list[Any]] = {
        name: [] for name in ("indices", "target_indices", "merged_indices", "assign", "tokens")
    }
    for attn, hidden, metric in zip(a["cls_attn"], a["hidden"], a["metric"], strict=True):
        score = attn.astype(float).sum(0)
        dominant = ranked(score.tolist(), list(range(1, len(score))))[: p["dominant"]]
        rest = [i for i in range(1, len(score)) if i not in dominant]
        step = max(1, len(rest) // p["contextual"])
        targets = rest[::step][: p["contextual"]]
        merged = [i for i in rest if i not in targets]
        joined: list[int] = []
        for i in merged:
            alike = [cosine(metric[i].astype(float), metric[t].astype(float)) for t in targets]
            joined.append(ranked(alike)[0])
        wide = hidden.astype(float)
        tokens = [wide[i] for i in sorted([0, *dominant])]
        for number, target in enumerate(targets):
            own = [wide[i] for i, j in zip(merged, joined, strict=True) if j == number]
            tokens.append(wide[target] + (sum(own) / len(own) if own else 0))
        found["indices"].append([0, *dominant])
        found["target_indices"].append(targets)
        found["merged_indices"].append(merged)
        found["assign"].append(joined)
        found["tokens"].append(tokens)
    return {
        name: np.array(rows, float if name == "tokens" else np.int64)
        for name, rows in found.items()
    }


def hiprune(a: Arrays, p: Params) -> Results:
    middle, deep = (a[f"attn_{name}"].astype(float).mean((1, 2)) for name in ("object", "deep"))
    budget = int(p["retention"] / len(deep))
    masks = []
    for objects, score in zip(middle[:, 1:], deep[:, 1:].copy(), strict=True):
        chosen: set[int] = set()
        for anchor in ranked(objects.tolist())[: round(budget * p["alpha"] / 5)]:
            chosen |= {min(max(anchor + step, 0), 575) for step in (0, -1, 1, -24, 24)}
        assert len(chosen) <= budget
        score[list(chosen)] -= 1
        mask = np.zeros(576, bool)
        mask[list(chosen) + ranked(score.tolist())[: budget - len(chosen)]] = True
        masks.append(mask)
    counts = np.array([int(mask.sum()) for mask in masks])
    return {"mask": np.array(masks), "indices": listed(masks), "counts": counts}


def hired(a: Arrays, p: Params) -> Results:
    n = p["n_tokens"]
    first, late = (a[f"{w}_layer_cls_attn"].astype(float).sum(1)[:, -n:] for w in ("first", "late"))
    masks, kept, subs, start = [], [], [], 0
    for parts in p["num_partitions"]:
        total = int(parts * n * p["rate"])
        full = min(int(total * p["alpha"]), n)
        sub = min(total - full, (parts - 1) * n)
        budgets = [full] + [0] * (parts - 1)
        if sub > 0:
            runs = [0] * (parts - 1)
            for i in ranked(first[start].tolist())[: int(n * (1 - p["alpha"]))]:
                runs[i // (n // (parts - 1))] += 1
            share = np.array(runs, np.float32) / np.float32(sum(runs)) * np.float32(sub)
            budgets[1:] = [min(int(s), n) for s in share]
        for i, budget in enumerate(budgets):
            mask = np.zeros(n, bool)
            mask[ranked(late[start + i].tolist())[:budget]] = True
            masks.append(mask)
        kept += budgets
        subs += budgets[1:]
        start += parts
    return {
        "mask": np.array(masks),
        "kept_per_partition": np.array(kept, np.int64),
        "sub_budgets": np.array(subs, np.int64),
    }


def fastv(a: Arrays, p: Params) -> Results:
    row = a["attn"].astype(float).mean(0)
    visual = list(range(p["image_start"], p["image_start"] + p["image_len"]))
    top = ranked(row.tolist(), visual)[: round(p["image_len"] * (1 - p["r"]))]
    keep = sorted(top + [i for i in range(len(row)) if i not in visual])
    return {"topk_visual": np.array(top, np.int64), "keep_indices": np.array(keep, np.int64)}


def windows(alike: np.ndarray, longest: int) -> tuple[list[tuple[int, int]], int]:
    best: list[tuple[int, list[tuple[int, int]]]] = [(0, [])]
    for end in range(len(alike) + 1):
        gain, parts = best[end][0], [*best[end][1], (end, end)]
        for width in range(2, min(end + 1, longest) + 1):
            start = end - width + 1
            static = int(alike[start:end].all(0).sum())
            if best[start][0] + static * (width - 1) > gain:
                gain = best[start][0] + static * (width - 1)
                parts = [*best[start][1], (start, end)]
        best.append((gain, parts))
    return best[-1][1], best[-1][0]


def peaks(x: np.ndarray, count: int, most: int) -> dict[int, list[int]]:
    """Centre -> what joins it."""
    n = len(x)
    far = [[math.sqrt(float(((a - b) ** 2).sum()) / len(a)) for b in x] for a in x]
    near = min(most, count)
    density = [math.exp(-sum(d * d for d in sorted(row)[:near]) / near) for row in far]
    widest = max(max(row) for row in far)
    reach = [
        min((far[i][j] for j in range(n) if density[j] > density[i]), default=widest)
        for i in range(n)
    ]
    centres = sorted(ranked([d * r for d, r in zip(density, reach, strict=True)])[:count])
    joins: dict[int, list[int]] = {c: [] for c in centres}
    for i in range(n):
        if i not in joins:
            joins[min(centres, key=lambda c: (far[i][c], c))].append(i)
    return joins


def holitom(a: Arrays, p: Params) -> Results:
    x = a["x"].astype(float)
    frames, n, _ = x.shape
    alike = np.array([[cosine(x[f, i], x[f + 1, i]) for i in range(n)] for f in range(frames - 1)])
    alike = alike.reshape(frames - 1, n)
    parts, saved = windows(alike > p["tau"], p["max_window_size"])
    total = frames * n
    ratio = min(p["retain_ratio"] / ((total - saved) / total), 1)
    tokens: list[np.ndarray] = []
    where: list[tuple[int, int, int]] = []  # place, frame and whether it is static
    counts = []
    for first, last in parts:
        before = len(tokens)
        static = [i for i in range(n) if first < last and (alike[first:last, i] > p["tau"]).all()]
        clusters = round(len(static) * ratio)
        if clusters:
            mean = x[first : last + 1, static].mean(0)
            for centre, joined in peaks(mean, clusters, p["K"]).items():
                rest = (1 - p["beta"]) * mean[joined].mean(0) if joined else 0
                tokens.append(p["beta"] * mean[centre] + rest if joined else mean[centre])
                where.append((static[centre], first, 1))
        for frame in range(first, last + 1):
            free = [i for i in range(n) if i not in static]
            best = ranked(a["attn"][frame].tolist(), free)[: math.ceil(len(free) * ratio)]
            tokens += [x[frame, i] for i in sorted(best)]
            where += [(i, frame, 0) for i in sorted(best)]
        counts.append(len(tokens) - before)
    place, frame, still = (np.array([w[i] for w in where], np.int64) for i in range(3))
    return {
        "segments": np.array(parts),
        "total_reduced": np.array([saved]),
        "effective_ratio": np.array([ratio]),
        "frame_similarity": alike,
        "segment_token_counts": np.array(counts),
        "tokens": np.array(tokens).reshape(-1, x.shape[2]),
        "token_pos": place,
        "token_frame": frame,
        "token_is_static": still.astype(np.uint8),
    }


def dtd(a: Arrays, p: Params) -> Results:
    x, n = a["x"].astype(float), p["H"] * p["W"]
    mask = np.ones(len(x), bool)
    for start in range(n, len(x), n):
        alike = [round(cosine(x[i], x[i - n]), 12) for i in range(start, start + n)]
        gone = [i for i in range(n) if alike[i] > p["threshold"]]
        if not p["absolute"]:
            gone = ranked(alike)[: int(n * p["threshold"])]
        mask[[start + i for i in gone]] = False
    return {"indices": listed([mask]), "per_frame": mask.reshape(p["T"], n).sum(1)}


def levelled(x: np.ndarray) -> np.ndarray:
    return (x - x.min()) / (x.max() - x.min())


def litevggt(a: Arrays, p: Params) -> Results:
    height, width, n = p["H"], p["W"], p["H"] * p["W"]
    frames = a["x"].astype(float).reshape(p["T"], height, width, -1)
    side, info = a["pixels"].shape[-1] // width, []
    for rows, picture in zip(frames, a["pixels"].astype(float), strict=True):
        grey = np.pad(np.tensordot((0.299, 0.587, 0.114), picture, 1), 1)
        slope, spread = np.zeros(grey.shape), np.zeros((height, width))
        for y, x in np.ndindex(grey.shape[0] - 2, grey.shape[1] - 2):
            near = grey[y : y + 3, x : x + 3]
            across = near[:, 2] - near[:, 0]
            down = near[2] - near[0]
            slope[y, x] = math.hypot(across @ (1, 2, 1), down @ (1, 2, 1))
        edges = np.zeros((height, width))
        for y, x in np.ndindex(height, width):
            edges[y, x] = slope[y * side : (y + 1) * side, x * side : (x + 1) * side].mean()
            about = rows[max(0, y - 1) : y + 2, max(0, x - 1) : x + 2].reshape(-1, rows.shape[-1])
            spread[y, x] = about.var(0).sum()
        info.append(levelled(0.3 * levelled(spread) + 0.7 * levelled(edges)) ** 1.4)
    anchors, kept = list(range(n)), set(range(n))
    for t in range(1, p["T"]):
        for y, x in np.ndindex(height // 2, width // 2):
            box = [(2 * y + i, 2 * x + j) for i, j in np.ndindex(2, 2)]
            low = min(box, key=lambda place, t=t: info[t][place])
            anchors.append(t * n + low[0] * width + low[1])
        salient = ranked(info[t].flatten().tolist())[: max(1, int(0.1 * n))]
        kept |= {t * n + i for i in salient}
    kept |= {*anchors}
    rows = frames.reshape(p["T"] * n, -1)
    target = [
        i if i in kept else max(anchors, key=lambda j, i=i: cosine(rows[i], rows[j]))
        for i in range(len(rows))
    ]
    found = {"kept": np.array(sorted(kept)), "target": np.array(target)}
    return {"info": np.array(info).flatten(), **found}


def evs(a: Arrays, p: Params) -> Results:
    n = p["H"] // p["spatial_merge_size"] * (p["W"] // p["spatial_merge_size"])
    x = a["x"].astype(float)
    change = [255.0] * n + [1 - cosine(x[i], x[i - n]) for i in range(n, len(x))]
    change = [round(c, 12) for c in change]
    keep = ranked(change)[: max(n, int(p["T"] * n * (1 - p["q"])))]
    mask = np.zeros(len(x), bool)
    mask[keep] = True
    per_frame = mask.reshape(p["T"], n).sum(1)
    return {"mask": mask, "indices": listed([mask]), "per_frame": per_frame}


def tome(a: Arrays, p: Params) -> Results:
    batch, n, _ = a["x"].shape
    special = [bool(p["class_token"]), bool(p["distill_token"])]
    count = max(0, min(p["r"], (n - sum(special)) // 2))
    found: dict[str, list[Any]] = {
        name: [] for name in ("unm_idx", "src_idx", "dst_idx", "x", "size", "source")
    }
    for item in range(batch):
        metric = [unit(row) for row in a["metric"][item].astype(float)]
        size = a["size"][item, :, 0] if "size" in a else np.ones(n)
        even, odd = list(range(0, n, 2)), list(range(1, n, 2))
        best = {}
        for i in even:
            score = [-math.inf if special[1] and j == 1 else metric[i] @ metric[j] for j in odd]
            best[i] = (max(score, default=0.0), ranked(score)[0] if score else 0)
        if special[0]:
            best[0] = (-math.inf, 0)
        order = sorted(even, key=lambda i: (-round(best[i][0], 12), i)) if count else even
        stay = sorted(order[count:]) if special[0] else order[count:]
        groups = {j: [j] for j in odd}
        for i in order[:count]:
            groups[odd[best[i][1]]].append(i)
        emitted = [[i] for i in stay] + [groups[j] for j in odd]
        if special[1]:
            emitted = [emitted[i] for i in [0, len(stay), *range(1, len(stay))]]
            emitted += [groups[j] for j in odd[1:]]
        if not count:
            emitted = [[i] for i in range(n)]
        found["unm_idx"].append([i // 2 for i in stay])
        found["src_idx"].append([i // 2 for i in order[:count]])
        found["dst_idx"].append([best[i][1] for i in order[:count]])
        mass = [sum(size[i] for i in group) for group in emitted]
        rows = a["x"][item].astype(float)
        found["x"].append(
            [sum(size[i] * rows[i] for i in g) / m for g, m in zip(emitted, mass, strict=True)]
        )
        found["size"].append([[m] for m in mass])
        found["source"].append([[int(i in group) for i in range(n)] for group in emitted])
    kinds = {"x": float, "size": float, "source": np.uint8}
    return {name: np.array(rows, kinds.get(name, np.int64)) for name, rows in found.items()}


def class_attention(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    logits = keys.astype(float) @ query[0].astype(float) / math.sqrt(keys.shape[1])
    mass = np.exp(logits - logits.max())
    return (mass / mass.sum())[1:]


def outlier_share(attn: np.ndarray) -> float:
    first, third = np.percentile(attn, [25, 75])
    return int((attn > third + 1.5 * (third - first)).sum()) / attn.size


def merged(
    chosen: list[int], rest: list[int], attn: np.ndarray, keys: np.ndarray, x: np.ndarray
) -> list[np.ndarray]:
    """Tokens of the list, each with its 32 neighbours, and the sum of the rest, maybe of none."""
    tokens = []
    rows = np.array([unit(key) for key in keys])
    for place, i in enumerate(chosen):
        others = chosen[:place] + chosen[place + 1 :] + rest
        alike = (rows[others] @ rows[i]).round(12).tolist()
        near = [others[k] for k in ranked(alike)[:32]]
        tokens.append(x[i] + sum(attn[j] * x[j] for j in near))
    return [*tokens, sum((attn[j] * x[j] for j in rest), np.zeros(x.shape[1]))]


def prumerge(a: Arrays, p: Params, spread: bool = False) -> Results:
    attn = np.array([class_attention(*pair) for pair in zip(a["q_cls"], a["k"], strict=True)])
    n = attn.shape[1]
    ratio = outlier_share(attn) if p["adaptive"] else p["ratio"]
    indices, tokens = [], []
    for score, keys, x in zip(attn, a["k"].astype(float), a["features"].astype(float), strict=True):
        chosen = ranked(score.tolist())[: int(n * ratio)]
        if spread and p["adaptive"]:
            step = int(int(1 / ratio) / 3)
            chosen += [i for i in range(0, 575, step) if i not in chosen]
        elif spread:
            step = int(1 / ratio)
            chosen += list(range(step // 2, 575, step))
        zeroed = sorted(0 if i in chosen else i for i in range(n))
        indices.append(chosen)
        tokens.append(merged(chosen, zeroed[len(chosen) :], score, keys[1:], x))
    return {
        "indices": np.array(indices, np.int64),
        "ratio": np.array([ratio]),
        "cls_attn": attn,
        "tokens": np.array(tokens),
    }


def prumerge_plus(a: Arrays, p: Params) -> Results:
    return prumerge(a, p, spread=True)


def dycoke(a: Arrays, p: Params) -> Results:
    n = p["tokens_per_frame"]
    x = a["x"].astype(float)
    frames = len(x) // n
    count = int((1 - p["merging_ratio"]) * n)

    def least_alike(frame: int, other: int) -> list[int]:
        alike = [round(cosine(x[frame * n + i], x[other * n + i]), 12) for i in range(n)]
        return [frame * n + i for i in ranked([-c for c in alike])[:count]]

    kept: list[list[int]] = []
    for i in range(0, frames - 1, 2):
        kept += [list(range(i * n, (i + 1) * n)), least_alike(i + 1, i)]
    for i in range(0, frames - 4, 4):
        kept[i + 2] = least_alike(i + 2, i)
    indices = np.array([i for part in kept for i in part], np.int64)
    per_frame = np.array([len(part) for part in kept])
    return {"indices": indices, "per_frame": per_frame, "tokens": x[indices]}


def kernel(a: np.ndarray, b: np.ndarray) -> float:
    square = float(((a - b) ** 2).sum())
    return sum(math.exp(-square / (2 * width)) for width in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def steady(x: np.ndarray) -> list[int]:
    spread = [float(np.var(x[:, c])) for c in range(x.shape[1])]
    return sorted(range(len(spread)), key=lambda c: (spread[c], c))[: int(x.shape[1] / 2)]


def stc_pruner(a: Arrays, p: Params) -> Results:
    n = {"clip": 144, "llava_ov": 196, "llava_vid": 169}[p["model"]]
    memory: list[np.ndarray] = []
    found: dict[str, list[Any]] = {
        name: [] for name in ("indices", "channels", "score", "raw_rows", "raw_rows_per_chunk")
    }
    start = 0
    for frames in p["chunk_frames"]:
        chunk = a["x"][start : start + frames * n].astype(float)
        start += frames * n
        channels = steady(chunk)
        memory.append(chunk[:, channels].mean(0))
        past = unit(np.mean(memory, axis=0))
        rows: list[int] = []
        for frame in range(frames):
            tokens = np.array(
                [unit(row) for row in chunk[frame * n : (frame + 1) * n][:, channels]]
            )
            score = [kernel(row, past) + kernel(row, tokens.mean(0)) for row in tokens]
            kept = sorted(ranked([-s for s in score])[: p["keep_per_frame"]])
            found["indices"].append(kept)
            found["score"].append(score)
            rows += [frame * 182 + i // 13 * 14 + i % 13 for i in kept]
            rows += [frame * 182 + line * 14 + 13 for line in range(13)]
        found["channels"].append(channels)
        found["raw_rows"] += rows
        found["raw_rows_per_chunk"].append(len(rows))
    names = list(found) if p["model"] == "llava_vid" else list(found)[:3]
    return {name: np.array(found[name], float if name == "score" else np.int64) for name in names}


def vidcom2(a: Arrays, p: Params) -> Results:
    n = p["tokens_per_frame"]
    channels = steady(a["x"].astype(float))
    tokens = np.array([unit(row) for row in a["x"].astype(float)[:, channels]])
    video = tokens.mean(0)
    score, weight = [], []
    for frame in tokens.reshape(-1, n, len(channels)):
        near = [kernel(row, video) for row in frame]
        weight.append(-sum(near) / n)
        score.append([v + kernel(row, frame.mean(0)) for v, row in zip(near, frame, strict=True)])
    raised = [math.exp((w - max(weight)) / 0.01) for w in weight]
    share = [r / sum(raised) for r in raised]
    mean = sum(share) / len(share)
    scales = [min(1.0, p["base_scale"] * (1 + s - mean)) for s in share]
    kept = [max(1, round(round(s * n, 9))) for s in scales]
    indices = [
        f * n + i
        for f, count in enumerate(kept)
        for i in sorted(ranked([-s for s in score[f]])[:count])
    ]
    return {
        "indices": np.array(indices),
        "per_frame": np.array(kept),
        "channels": np.array(sorted(channels)),
        "scales": np.array(scales),
        "score": np.array(score),
    }


def pixelprune(a: Arrays, p: Params) -> Results:
    merge = p["spatial_merge_size"]
    pixels = a["pixel_values"].astype(float)
    pixels = pixels.reshape(-1, merge * merge * pixels.shape[1])
    exact = p["metric"] == "exact"
    limit = 0.0 if exact else p["threshold"]

    def match(one: np.ndarray, other: np.ndarray) -> bool:
        gap = np.abs(one - other)
        far = {"mae": gap.mean(), "rmse": math.sqrt(float((gap**2).mean()))}
        return bool(far.get(p["metric"], gap.max()) <= limit)

    kept: list[list[int]] = []
    start = 0
    for _, height, width in a["grid_thw"].tolist():
        rows, columns = height // merge, width // merge
        image = pixels[start : start + rows * columns].copy()
        start += rows * columns
        seen, keep = image.copy(), [0]
        for i in range(1, rows * columns):
            y, x = divmod(i, columns)
            left, upper = seen[i - 1], seen[i - columns] if y else seen[i - 1]
            guess = left
            if y and x:
                corner = seen[i - columns - 1]
                guess = upper if match(corner, left) and not match(corner, upper) else left
            elif y:
                guess = upper
            if not match(image[i], guess):
                keep.append(i)
            elif p["anchored"] and not exact:
                seen[i] = guess
        kept.append(keep)
    return {
        "indices": np.array([i for part in kept for i in part]),
        "counts": np.array([len(part) for part in kept]),
    }


def cdpruner(a: Arrays, p: Params) -> Results:
    texts = a["text_embeds"].astype(float)
    relevance = np.array(
        [
            [-sum(cosine(row, text) for text in texts) / len(texts) for row in image]
            for image in a["image_embeds"].astype(float)
        ]
    )
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    picks, masks = [], []
    for x, quality in zip(a["features"].astype(float), relevance, strict=True):
        rows = np.array([unit(row) * q for row, q in zip(x, quality, strict=True)])
        kernel_matrix = rows @ rows.T
        gain, found = kernel_matrix.diagonal().copy(), list[int]()
        columns: list[np.ndarray] = []
        while len(found) < p["keep"]:
            j = int(gain.argmax())
            e = kernel_matrix[j] - sum((c[j] * c for c in columns), np.zeros(len(x)))
            e = e / math.sqrt(gain[j])
            columns.append(e)
            gain = gain - e**2
            gain[j] = -math.inf
            found.append(j)
        picks.append(found)
        masks.append(np.isin(np.arange(len(x)), found))
    return {
        "indices": np.array(picks, np.int64),
        "mask": np.array(masks),
        "relevance": relevance,
    }


def fastvid(a: Arrays, p: Params) -> Results:
    frames, n, width = a["x"].shape
    attn = a["attn"].astype(float).reshape(-1)
    item = Item(a["x"].astype(float).reshape(-1, width), attn=attn, grid=(frames, 1, n))
    knobs = {"segments": p["c"], "tau": p["tau"], "context": p["d"], "every": p["p"]}
    budget = frames * int(n * p["retention_ratio"])
    answer = oracles_compose.fastvid(item, budget, **knobs, beta=p["beta"])
    return {"indices": np.array(answer.keep), "tokens": answer.matrix @ item.x}


def framefusion(a: Arrays, p: Params) -> Results:
    x, n = a["x"].astype(float), p["frame_tokens"]
    item = Item(x, grid=(len(x) // n, 1, n), signals={"attn_visual": np.zeros(len(x))})
    answer = oracles_video.framefusion(item, p.get("keep"), p["tau"])
    return {"mask": np.isin(np.arange(len(x)), answer.keep), "tokens": answer.matrix @ x}


def prunevid(a: Arrays, p: Params) -> Results:
    frames, n, width = a["x"].shape
    item = Item(a["x"].astype(float).reshape(-1, width), grid=(frames, 1, n))
    share = p["temporal_segment_ratio"]
    answer = oracles_video.prunevid(item, None, p["tau"], share, p["cluster_ratio"])
    tokens = answer.matrix @ item.x
    sizes = [len(part) for part in oracles_video.scenes_of(item, share)]
    return {"tokens": tokens[tokens.sum(-1).argsort()], "window_sizes": np.array(sizes)}


def vispruner(a: Arrays, p: Params) -> Results:
    masks = []
    for x, attn in zip(a["features"].astype(float), a["attn"].astype(float), strict=True):
        item = Item(x, attn=attn.mean(0))
        answer = oracles_compose.vispruner(item, p["visual_token_num"], p["important_ratio"])
        masks.append(np.isin(np.arange(len(x)), answer.keep))
    return {"mask": np.array(masks)}


def v_cast(a: Arrays, p: Params) -> Results:
    frames, n, width = a["x"].shape
    item = Item(a["x"].astype(float).reshape(-1, width), grid=(frames, 1, n))
    budget = max(frames, round(item.n * p["retain_ratio"]))
    keep = np.array(oracles_video.v_cast(item, budget).keep)
    return {"indices": keep, "per_frame": np.bincount(keep // n, minlength=frames)}


def holitom_inner(a: Arrays, p: Params) -> Results:
    first, n = p["image_start"], p["image_len"]
    x, attn = a["x"].astype(float), a["attn"].astype(float).mean(0)
    item = Item(x[first : first + n], attn=attn[first : first + n])
    answer = oracles.holitom_inner(item, round(n * (1 - p["r"])))
    places = around(answer.keep, first, n, len(x))
    return {"keep_indices": places, "tokens": answer.matrix @ item.x}


def around(keep: list[int], first: int, n: int, length: int) -> np.ndarray:
    return np.array([i for i in range(length) if not 0 <= i - first < n or i - first in keep])


def dart(a: Arrays, p: Params) -> Results:
    first, n = p["image_start"], p["image_len"]
    pivots, words = p["pivot_image_token"], p["pivot_text_token"]
    norm = np.abs(a["keys"].astype(float)).sum((0, 2))
    states = a["states"].astype(float)
    signals = {"key_norm": norm[first : first + n], "text_key_norm": norm[first + n :]}
    item = Item(states[first : first + n], query=states[first + n :], signals=signals)
    each = int(n * (1 - p["reduction_ratio"]) // (pivots + words))
    answer = oracles_llm.dart(item, pivots + each * (pivots + words), pivots, words)
    return {"indices": first + np.array(sorted(answer.keep))}


def ivc_prune(a: Arrays, p: Params) -> Results:
    first, n = p["image_start"], p["image_len"]
    values, turn = a["values"].astype(float), a["rope"].astype(float).mean((0, 2))
    signals = {"rope": turn[first : first + n], "text_values": values[first + n + 2 :]}
    rows = values[first : first + n].reshape(n, -1)
    item = Item(rows, signals={**signals, "values": rows})
    keep = oracles_llm.ivc_prune(item, round(n * 0.5)).keep
    return {"keep_indices": around(keep, first, n, len(values))}


def gemfilter(a: Arrays, p: Params) -> Results:
    query, key = a["query"][0, :, 0].astype(float), a["key"][0].astype(float)
    group = len(query) // len(key)
    products = sum(key[head // group] @ row for head, row in enumerate(query))
    item = Item(key[0], signals={"attn_ahead": np.asarray(products)})
    return {"indices": np.array(sorted(oracles_llm.gemfilter(item, p["topk"]).keep))}


def pyramiddrop(a: Arrays, p: Params) -> Results:
    masks = np.zeros((len(a["key"]), a["key"].shape[2]), bool)
    for row, (query, key) in enumerate(zip(a["query"], a["key"], strict=True)):
        first, n = p["image_index"][row], int(p["image_tokens"][row] * p["ratios"][0])
        length = n + p["prompt_len"][row]
        score = np.zeros(length)
        for q, k in zip(query[:, 0].astype(float), key[:, :length].astype(float), strict=True):
            power = np.exp(k @ q / math.sqrt(len(q)))
            score += power / power.sum()
        budget = int(p["image_tokens"][row] * p["ratios"][1])
        keep = ranked(score[first : first + n].tolist())[:budget]
        masks[row, around(keep, first, n, length)] = True
    return {"mask": masks}


def sparsevlm(a: Arrays, p: Params) -> Results:
    x, query = a["x"].astype(float), a["query"].astype(float)
    power = np.exp(np.array([[cosine(token, word) for word in query] for token in x]))
    speaks = (power / power.sum(1, keepdims=True)).mean(0)
    clusters = int((int((len(x) - p["keep"]) * 0.3) + 1) / 10) + 1
    item = Item(x, query=query, signals={"attn_text": a["attn"].astype(float).mean(0).T})
    answer = oracles_llm.sparsevlm(item, p["keep"] + clusters)
    tokens = answer.matrix @ x
    alone = [place for place, group in answer.groups.items() if len(group) == 1]
    return {
        "raters": speaks > speaks.mean(),
        "mask": np.isin(np.arange(len(x)), alone),
        "tokens": tokens[tokens.sum(-1).argsort()],
    }


def saint(a: Arrays, p: Params) -> Results:
    if "r" in p:
        rounds = (oracles_compose.least_alike(k, p["keep_num"] - 1, p["r"]) for k in a["keys"])
        return {"indices": np.array([*rounds], np.int64)}
    rule = (p["sim_threshold"], p["K"], p["gamma"])
    answers = [oracles_compose.saint(Item(k), None, *rule) for k in a["keys"].astype(float)]
    return {"indices": np.array([answer.keep for answer in answers])}


def script(a: Arrays, p: Params) -> Results:
    texts, masks = a["text_embeds"].astype(float), []
    images = zip(a["features"].astype(float), a["image_embeds"].astype(float), strict=True)
    for features, space in images:
        match = [[float(row @ text) for text in texts] for row in space]
        means = [sum(row[t] for row in match) for t in range(len(texts))]
        words = ranked(means)[: max(1, len(texts) // 2)]
        score = np.array([-sum(row[t] for t in words) / len(words) for row in match])
        quality = (score - score.min()) / (score.max() - score.min() + 1e-6)
        gain, kept = quality**2, np.zeros(len(features), bool)
        for _ in range(p["keep"]):
            j = max((i for i in range(len(gain)) if not kept[i]), key=lambda i: (gain[i], -i))
            kept[j] = True
            if gain[j] > 0:
                row = [
                    cosine(f, features[j]) * q * quality[j]
                    for f, q in zip(features, quality, strict=True)
                ]
                gain = gain - (np.array(row) / (math.sqrt(gain[j]) + 1e-6)) ** 2
        masks.append(kept)
    return {"mask": np.array(masks)}


def softmax_of(query: np.ndarray, keys: np.ndarray, place: int, last: int) -> np.ndarray:
    """Attention `[last + 1]` of the query at `place` of one head to the keys up to `last`."""
    power = np.exp(keys[: last + 1] @ query[place] / math.sqrt(query.shape[1]))
    return np.asarray(power / power.sum())


def fastkv(a: Arrays, p: Params) -> Results:
    query, keys, window = a["query"].astype(float), a["keys"].astype(float), p["window_size"]
    n, group = query.shape[1], len(query) // len(keys)
    score = np.zeros(n - window)
    for head, row in enumerate(query):
        for place in range(n - window, n):
            score += softmax_of(row, keys[head // group], place, place)[: n - window]
    item = Item(keys[0][: n - window], signals={"attn_window": score})
    keep = oracles_llm.fastkv(item, p["tsp_length"] - window, p["kernel_size"]).keep
    return {"indices": np.array(sorted(keep) + list(range(n - window, n)), np.int64)}


def visiondrop(a: Arrays, p: Params) -> Results:
    query, key, x = (a[name].astype(float) for name in ("query", "key", "x"))
    first, n = p["image_start"], p["image_len"]
    score = np.zeros(n)
    for q, k in zip(query, key, strict=True):
        for place in range(first, first + n):
            seen = softmax_of(q, k, place, place)[first:]
            score[: len(seen)] += seen
    dominant = sorted(ranked(score.tolist())[: p["dominant"]])
    rest = [i for i in range(n) if i not in dominant]
    targets = rest[:: max(1, len(rest) // p["contextual"])][: p["contextual"]]
    metric = key.mean(0)[first : first + n]
    joined: dict[int, list[int]] = {t: [] for t in targets}
    for i in (i for i in rest if i not in joined):
        joined[targets[ranked([cosine(metric[i], metric[t]) for t in targets])[0]]].append(i)
    media = x[first : first + n]
    tokens = [media[i] for i in dominant]
    tokens += [media[t] + (media[own].mean(0) if own else 0) for t, own in joined.items()]
    return {"indices": first + np.array(dominant, np.int64), "tokens": np.array(tokens)}


def audio_prune(a: Arrays, p: Params) -> Results:
    masks = []
    for query, key in zip(a["query"].astype(float), a["key"].astype(float), strict=True):
        n = query.shape[1]
        score = np.zeros(n)
        for q, k in zip(query, key, strict=True):
            score += sum(softmax_of(q, k, place, n - 1) for place in range(1, n))
        best = ranked(score[1:].tolist())[: math.ceil(p["keep_rate"] * (n - 1))]
        masks.append(np.isin(np.arange(n - 1), best))
    return {"mask": np.array(masks)}


def prunevid_inner(a: Arrays, p: Params) -> Results:
    query, key, first = a["query"].astype(float), a["key"].astype(float), p["image_start"]
    last = first + p["image_len"]
    score = [0.0] * p["image_len"]
    for q, k in zip(query, key, strict=True):
        for place in range(last, len(q)):
            paid = softmax_of(q, k, place, place)[first:last]
            score = [max(pair) for pair in zip(score, paid, strict=True)]
    keep = sorted(ranked(score)[: int(p["image_len"] * p["alpha"])])
    return {"indices": first + np.array(keep, np.int64)}


def adaptinfer(a: Arrays, p: Params) -> Results:
    query, key, first = a["query"].astype(float), a["key"].astype(float), p["image_start"]
    last, score = first + p["image_len"], np.zeros(p["image_len"])
    for q, k in zip(query, key, strict=True):
        paid = {place: softmax_of(q, k, place, place) for place in range(last, len(q))}
        for place, row in paid.items():
            got = sum(other[place] for later, other in paid.items() if later > place)
            score += (row[last:].sum() + got) * row[first:last]
    keep = sorted(ranked(score.tolist())[: p["keep"]])
    return {"indices": first + np.array(keep, np.int64), "score": score}


def info_rank(a: Arrays, p: Params) -> Results:
    u, sigma, _ = np.linalg.svd(a["x"].astype(float), full_matrices=False)
    score = [sum(abs(float(part)) * s for part, s in zip(row, sigma, strict=True)) for row in u]
    keep = sorted(ranked(score)[: p["keep"]])
    return {"indices": p["sys_length"] + np.array(keep, np.int64), "score": np.array(score)}


REFERENCES: Mapping[str, Callable[[Arrays, Params], Results]] = {
    function.__name__: function
    for function in (
        adaptinfer, audio_prune, cdpruner, dart, divprune, dtd, dycoke, evs, fastkv, fastv, fastvid,
        framefusion, gemfilter, hiprune, hired, holitom, holitom_inner, info_rank, ivc_prune,
        litevggt, pixelprune, prumerge, prumerge_plus, prunevid, prunevid_inner, pyramiddrop, saint,
        script, sparsevlm, stc_pruner, tome, v_cast, vidcom2, visiondrop, visionzip, vispruner,
    )
}  # fmt: skip
