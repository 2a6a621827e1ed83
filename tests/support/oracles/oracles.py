"""Slow, obvious versions of every reducer: loops over the written rule, in float64.

An oracle says which sources stand for the outputs (`keep`, ascending) and how each output is
combined (`matrix` `[M, N]`, so that outputs = matrix @ x). It shares no code with the package.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

import numpy as np
import oracles_compose
import oracles_encoder
import oracles_llm
import oracles_video
import torch
from oracle_base import SAME, Answer, Item, apart, cosine, dpc, pruned, ranked


def random(item: Item, budget: int, seed: int = 0) -> Answer:
    order = torch.randperm(item.n, generator=torch.Generator().manual_seed(seed)).tolist()
    return pruned(item.n, order[:budget])


def uniform(item: Item, budget: int) -> Answer:
    run = Fraction(item.n, budget)
    return pruned(item.n, [math.floor(run * i + run / 2) for i in range(budget)])


def pool(item: Item, budget: int) -> Answer:
    _, rows, columns = grid = item.grid or (1, 1, item.n)
    groups: dict[int, dict[int, float]] = {}

    def cut(box: list[range], cells: int) -> None:
        if cells == 1:
            tokens = [(t * rows + y) * columns + x for t in box[0] for y in box[1] for x in box[2]]
            t, y, x = (side[(len(side) - 1) // 2] for side in box)
            groups[(t * rows + y) * columns + x] = {token: 1 / len(tokens) for token in tokens}
            return
        sides = [len(side) for side in box]
        axis = 1 if sides[1] == max(sides) else 2 if sides[2] == max(sides) else 0
        first = cells // 2
        at = min(max(round(sides[axis] * first / cells), 1), sides[axis] - 1)
        left, right = list(box), list(box)
        left[axis], right[axis] = box[axis][:at], box[axis][at:]
        room_left = math.prod(len(side) for side in left)
        room_right = math.prod(len(side) for side in right)
        first = round(cells * at / sides[axis])
        first = max(first, 1, cells - room_right)
        first = min(first, cells - 1, room_left)
        cut(left, first)
        cut(right, cells - first)

    cut([range(side) for side in grid], budget)
    return Answer(item.n, groups)


def _whole(value: Fraction) -> int:
    """The nearest whole number of at least 1, up on a tie."""
    return max(1, math.floor(value + Fraction(1, 2)))


def smaller(grid: tuple[int, int, int], budget: int) -> tuple[int, int, int]:
    """Every size of the picture's shape that fits, by trying all; the largest wins."""
    frames, rows, columns = grid
    if budget < frames:
        return budget, 1, 1
    found = []
    for y in range(1, rows + 1):
        for x in range(1, columns + 1):
            shaped = x == _whole(Fraction(y * columns, rows)) or y == _whole(
                Fraction(x * rows, columns)
            )
            if shaped and frames * y * x <= budget:
                found.append((y * x, -abs(y * columns - x * rows), y, x))
    return frames, *max(found)[2:]


def _hat(n: int, m: int, place: int) -> dict[int, float]:
    """Weights of n places in output `place` of m: the two places around its middle."""
    middle = min(max((place + 0.5) * n / m - 0.5, 0.0), n - 1.0)
    low = math.floor(middle)
    weights = {low: 1 - (middle - low), low + 1: middle - low}
    return {i: weight for i, weight in weights.items() if weight > 1e-12}


def _resized(grid: tuple[int, int, int], budget: int) -> dict[int, dict[int, float]]:
    small = smaller(grid, budget)
    groups: dict[int, dict[int, float]] = {}
    for place in itertools.product(*(range(m) for m in small)):
        standing = [(2 * i + 1) * n // (2 * m) for i, n, m in zip(place, grid, small, strict=True)]
        axes = [_hat(n, m, i) for i, n, m in zip(place, grid, small, strict=True)]
        mixed = {}
        for t, y, x in itertools.product(*axes):
            weight = axes[0][t] * axes[1][y] * axes[2][x]
            mixed[(t * grid[1] + y) * grid[2] + x] = weight
        t, y, x = standing
        groups[(t * grid[1] + y) * grid[2] + x] = mixed
    return groups


def downsample(item: Item, budget: int) -> Answer:
    if item.grid is not None or "place" not in item.signals:
        return Answer(item.n, _resized(item.grid or (1, 1, item.n), budget))
    tiles = item.signals.get("tile", np.zeros(item.n))
    groups: dict[int, dict[int, float]] = {}
    for wanted in (False, True):  # the overview, then the mosaic with what is left
        mine = [i for i in range(item.n) if bool(tiles[i] > 0) is wanted]
        if not mine or len(groups) not in (0, sum(tiles == 0)) or len(groups) == budget:
            continue
        places = {tuple(int(v) for v in item.signals["place"][i]): i for i in mine}
        axes = [sorted({place[axis] for place in places}) for axis in range(3)]
        order = [places[place] for place in itertools.product(*axes)]
        grid = tuple(map(len, axes))
        room = min(budget - len(groups), len(mine))
        for standing, mixed in _resized(grid, room).items():
            groups[order[standing]] = {order[i]: weight for i, weight in mixed.items()}
    return Answer(item.n, groups)


def _evs_with_holes(item: Item, budget: int | None, threshold: float) -> Answer:
    """Tokens by place; what has no predecessor is new."""
    place = [tuple(int(v) for v in row) for row in item.signals["place"]]
    plane = [int(tile > 0) for tile in item.signals.get("tile", [0] * item.n)]
    at = {(p, *where): i for i, (p, where) in enumerate(zip(plane, place, strict=True))}

    def alike(i: int, dt: int, dy: int, dx: int) -> float:
        t, y, x = place[i]
        other = at.get((plane[i], t - dt, y - dy, x - dx))
        return -math.inf if other is None else cosine(item.x[i], item.x[other])

    start = min(t for t, _, _ in place)
    first = [i for i in range(item.n) if place[i][0] == start]
    later = [i for i in range(item.n) if place[i][0] > start]
    change = [1 - alike(i, 1, 0, 0) for i in range(item.n)]
    if budget is None:
        return pruned(item.n, first + [i for i in later if change[i] > threshold])
    if budget < len(first):
        novelty = [1 - max(alike(i, 0, 0, 1), alike(i, 0, 1, 0)) for i in range(item.n)]
        share = budget if not later else max(math.ceil(budget / 4), budget - len(later))
        first = ranked(novelty, first)[:share]
    return pruned(item.n, first + ranked(change, later)[: budget - len(first)])


def evs(item: Item, budget: int | None, threshold: float = 0.1) -> Answer:
    if item.grid is None and "place" in item.signals:
        return _evs_with_holes(item, budget, threshold)
    frames, rows, columns = item.grid or (1, 1, item.n)
    n = rows * columns
    change = [math.inf] * n
    change += [1 - cosine(item.x[i], item.x[i - n]) for i in range(n, item.n)]
    if budget is None:
        return pruned(item.n, [i for i in range(item.n) if change[i] > threshold])
    if budget >= n:
        return pruned(item.n, ranked(change)[:budget])
    # Less than a frame: a quarter for the first one, by difference from the left and upper token.
    novelty = []
    for i in range(n):
        neighbours = ([i - 1] if i % columns else []) + ([i - columns] if i >= columns else [])
        alike = [cosine(item.x[i], item.x[j]) for j in neighbours]
        novelty.append(1 - max(alike, default=-math.inf))
    share = budget if frames == 1 else math.ceil(budget / 4)
    first = ranked(novelty)[:share]
    later = ranked(change, list(range(n, item.n)))[: budget - share]
    return pruned(item.n, first + later)


def divprune(item: Item, budget: int) -> Answer:
    return pruned(item.n, apart(item.x, budget))


def fastv(item: Item, budget: int) -> Answer:
    return pruned(item.n, ranked(item.attn.tolist())[:budget])


def visionzip(item: Item, budget: int, contextual: float = 10 / 64) -> Answer:
    context = int(contextual) if contextual >= 1 else round(contextual * budget)
    dominant = ranked(item.attn.tolist())[: budget - context]
    answer = pruned(item.n, dominant)
    rest = [i for i in range(item.n) if i not in dominant]
    if not context:
        return answer
    targets = [rest[(2 * i + 1) * len(rest) // (2 * context)] for i in range(context)]
    joined: dict[int, list[int]] = {target: [] for target in targets}
    for i in rest:
        if i not in joined:
            joined[max(targets, key=lambda t: cosine(item.keys[i], item.keys[t]))].append(i)
    for target, others in joined.items():
        answer.groups[target] = {target: 0.5 if others else 1.0}
        answer.groups[target] |= {other: 0.5 / len(others) for other in others}
    return answer


def tome(item: Item, budget: int) -> Answer:
    metric = item.x if item.keys is None else item.keys
    mass = [1.0] * item.n if item.sizes is None else item.sizes.tolist()
    clusters = [(i, [i]) for i in range(item.n)]  # standing source, members

    def middle(members: list[int]) -> np.ndarray:
        return sum(mass[i] * metric[i] for i in members) / sum(mass[i] for i in members)

    while len(clusters) > budget:
        merges = min(len(clusters) // 2, len(clusters) - budget)
        points = [middle(members) for _, members in clusters]
        even, odd = range(0, len(clusters), 2), range(1, len(clusters), 2)
        best: dict[int, tuple[float, int]] = {}
        for a in even:
            alike = [(min(cosine(points[a], points[b]), SAME), -b) for b in odd]
            best[a] = max(alike)
        order = sorted(even, key=lambda a: (-best[a][0], a))
        for a in order[:merges]:
            b = -best[a][1]
            clusters[b][1].extend(clusters[a][1])
        clusters = [c for i, c in enumerate(clusters) if i not in order[:merges]]
    answer = Answer(item.n)
    for standing, members in clusters:
        total = sum(mass[i] for i in members)
        answer.groups[standing] = {i: mass[i] / total for i in members}
    return answer


def segments(alike: np.ndarray, longest: int) -> tuple[list[tuple[int, int]], int]:
    """Windows with the greatest gain; `alike` is bool `[T - 1, n]`."""
    frames = len(alike) + 1
    best: list[tuple[int, list[tuple[int, int]]]] = [(0, [])]
    for end in range(frames):
        gain, chosen = best[end][0], [*best[end][1], (end, end)]
        for width in range(2, min(end + 1, longest) + 1):
            start = end - width + 1
            static = sum(all(alike[f, p] for f in range(start, end)) for p in range(alike.shape[1]))
            if best[start][0] + static * (width - 1) > gain:
                gain = best[start][0] + static * (width - 1)
                chosen = [*best[start][1], (start, end)]
        best.append((gain, chosen))
    return best[-1][1], best[-1][0]


def holitom_exact(
    budget: int,
    chosen: list[int],
    left_out: list[int],
    late: list[int],
    static: dict[tuple[int, int], list[int]],
    clusters: dict[tuple[int, int], int],
) -> tuple[list[int], list[int]]:
    """Move single tokens until the budget is met; `clusters` is changed in place."""
    parts, released = list(static), list[int]()
    while len(chosen) + sum(clusters.values()) > budget and chosen:
        left_out.insert(0, chosen.pop())
    while len(chosen) + sum(clusters.values()) > budget:
        clusters[max(parts, key=lambda part: (clusters[part], -part[0]))] -= 1
    while len(chosen) + sum(clusters.values()) < budget and left_out:
        chosen.append(left_out.pop(0))
    while len(chosen) + sum(clusters.values()) < budget and any(
        clusters[part] < len(static[part]) for part in parts
    ):
        room = {part: len(static[part]) - clusters[part] for part in parts}
        clusters[max(parts, key=lambda part: (room[part], -part[0]))] += 1
    while len(chosen) + sum(clusters.values()) + len(released) < budget:
        released.append(late.pop(0))
    return chosen, released


def holitom(
    item: Item,
    budget: int | None,
    tau: float | None = None,
    beta: float = 0.6,
    neighbours: int = 7,
    window: int = 1024,
    ratio: float = 1.0,
) -> Answer:
    frames = item.grid[0] if item.grid else 1
    n = item.n // frames
    share = ratio if budget is None else budget / item.n
    if tau is None:
        tau = 0.65 if share <= 0.125 else 0.80
    alike = np.array(
        [
            [cosine(item.x[f * n + p], item.x[(f + 1) * n + p]) > tau for p in range(n)]
            for f in range(frames - 1)
        ]
    ).reshape(frames - 1, n)
    parts, saved = segments(alike, window)
    share = min(share / ((item.n - saved) / item.n), 1)
    static = {
        (a, b): [p for p in range(n) if a < b and all(alike[f, p] for f in range(a, b))]
        for a, b in parts
    }
    clusters = {part: round(len(places) * share) for part, places in static.items()}
    chosen: list[int] = []
    left_out: list[int] = []
    for (a, b), places in static.items():
        for f in range(a, b + 1):
            dynamic = ranked(item.attn.tolist(), [f * n + p for p in range(n) if p not in places])
            quota = math.ceil(len(dynamic) * share)
            chosen += dynamic[:quota]
            left_out += dynamic[quota:]
    released: list[int] = []
    if budget is not None:
        score = item.attn.tolist()
        late = [f * n + p for (a, b), ps in static.items() for f in range(a + 1, b + 1) for p in ps]
        ranks = ranked(score, chosen), ranked(score, left_out), ranked(score, late)
        chosen, released = holitom_exact(budget, *ranks, static, clusters)
    answer = pruned(item.n, chosen + released)
    for (a, b), places in static.items():
        if not clusters[a, b]:
            continue
        points = [sum(item.x[f * n + p] for f in range(a, b + 1)) / (b - a + 1) for p in places]
        if clusters[a, b] == len(places):
            members = {i: [i] for i in range(len(places))}
        else:
            members = dpc(points, clusters[a, b], neighbours)
        for centre, group in members.items():
            weights: dict[int, float] = {}
            for i in group:
                part = 1.0 if len(group) == 1 else beta if i == centre else None
                part = (1 - beta) / (len(group) - 1) if part is None else part
                sources = [f * n + places[i] for f in range(a, b + 1)]
                sources = [s for s in sources if s not in released]
                weights |= {s: part / len(sources) for s in sources}
            answer.groups[a * n + places[centre]] = weights
    return answer


def holitom_inner(item: Item, budget: int) -> Answer:
    keep = ranked(item.attn.tolist())[:budget]
    answer = pruned(item.n, keep)
    for i in range(item.n):
        if i not in keep:
            alike = [cosine(item.x[i], item.x[k]) for k in keep]
            # Cosines of equal rows may differ in the last bit; the first kept one wins.
            target = keep[next(s for s, a in enumerate(alike) if a >= max(alike) - 1e-12)]
            group = {source: weight / 2 for source, weight in answer.groups[target].items()}
            answer.groups[target] = group | {i: 0.5}
    return answer


def geometry(frame: np.ndarray) -> list[float]:
    """Half the slope, half the spread about each token of `[h, w, D]` unit rows, in order."""
    rows, columns, _ = frame.shape
    slopes, spreads = [], []
    for y in range(rows):
        for x in range(columns):

            def at(dy: int, dx: int, y: int = y, x: int = x) -> np.ndarray:
                return frame[min(max(y + dy, 0), rows - 1), min(max(x + dx, 0), columns - 1)]

            across = sum(w * (at(d, 1) - at(d, -1)) for d, w in ((-1, 1), (0, 2), (1, 1))) / 8
            down = sum(w * (at(1, d) - at(-1, d)) for d, w in ((-1, 1), (0, 2), (1, 1))) / 8
            slopes.append(math.sqrt(oracles_compose.snap(across @ across + down @ down)))
            near = frame[max(y - 1, 0) : y + 2, max(x - 1, 0) : x + 2].reshape(-1, frame.shape[2])
            spreads.append(oracles_compose.snap(float(near.var(0).sum())))
    maps = [oracles_compose.rescaled(each) for each in (slopes, spreads)]
    return [(a + b) / 2 for a, b in zip(*maps, strict=True)]


def litevggt(
    item: Item,
    budget: int,
    salient: float = 0.3,
    first: bool = False,
    score: list[float] | None = None,
) -> Answer:
    frames, rows, columns = item.grid or (1, 1, item.n)
    size = rows * columns
    units = [row / (math.sqrt(float(row @ row)) or 1.0) for row in item.x]
    video = np.array(units).reshape(frames, rows, columns, -1)
    score = [value for frame in video for value in geometry(frame)] if score is None else score
    stay = min(round(salient * budget), budget - 1)
    start = size if first else 0
    anchors = list(range(start))
    if budget - stay - start:
        cut = Item(item.x[start:], grid=(frames - first, rows, columns))
        boxes = pool(cut, budget - stay - start).groups.values()
        anchors += [start + min(box, key=lambda i: (score[start + i], i)) for box in boxes]
    clip = [range(t * size, t * size + size) for t in range(frames)]
    free = [[i for i in tokens if i not in anchors] for tokens in clip]
    room = [len(tokens) for tokens in free]
    kept = list(anchors)
    for tokens, count in zip(free, oracles_encoder.shared(room, stay, room), strict=True):
        kept += ranked(score, tokens)[:count]
    groups = {i: [i] for i in kept}
    for i in range(item.n):
        if i not in groups:
            near = {a: min(cosine(item.x[i], item.x[a]), SAME) for a in sorted(anchors)}
            groups[max(near, key=lambda a: (near[a], -a))].append(i)
    return Answer(item.n, {i: dict.fromkeys(g, 1 / len(g)) for i, g in groups.items()})


ORACLES: Mapping[str, Callable[..., Answer]] = {
    **oracles_compose.ORACLES,
    **oracles_encoder.ORACLES,
    **oracles_llm.ORACLES,
    **oracles_video.ORACLES,
    "divprune": divprune,
    "downsample": downsample,
    "evs": evs,
    "fastv": fastv,
    "holitom": holitom,
    "holitom_inner": holitom_inner,
    "litevggt": litevggt,
    "pool": pool,
    "random": random,
    "tome": tome,
    "uniform": uniform,
    "visionzip": visionzip,
}
