"""Standing of the methods: rows with paired tests, ranks with intervals, a method for each job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from mmfast.bench.leaderboard.grid import ANSWERS, BASELINE, SPEED, STOCK
from mmfast.bench.leaderboard.statistics import (
    SURE,
    Flags,
    calibration_error,
    holm,
    pareto,
    rank_intervals,
)
from mmfast.bench.own_data import mcnemar, paired_interval
from mmfast.bench.results import Row
from mmfast.tiny.evaluate import interval
from mmfast.tiny.training import shares

# Kinds of question behind the columns that say what a reduction does besides accuracy.
ABILITIES = {
    "text": ("number", "entry"),  # small signs, which leave first
    "order": ("first", "speed"),  # of events in time
    "count": ("count",),
    "place": ("position",),
}
LOSS = 0.05  # loss of accuracy that a fast method may have, at the end of its 95 % interval
COSTS = {  # axes of the fronts: the field of a row, and its name
    "kept": "visual tokens kept",
    "kv_bytes": "bytes of keys and values",
    # beside the stock model in the same rounds: cells are measured at different loads
    "ttft_1_share": "time to the first token, all tokens = 1",
    "ttft_8_share": "the same with eight requests at once",
}
Key = tuple[str, str, float]  # suite, method, budget


@dataclass(frozen=True)
class MethodAnswers:
    """Answers of a method at one budget to the questions of a suite, by seed."""

    rows: Mapping[int, Row]

    def flags(self, seeds: Iterable[int], field: str = "right") -> Flags:
        """Marks of the questions of some seeds, one after the other, `[Q]`."""
        return np.array([bit == "1" for seed in seeds for bit in self.rows[seed][field]])

    def kinds(self, seeds: Iterable[int]) -> list[str]:
        """Kind of each question; they take turns within a seed."""
        turns = [itertools.cycle(self.rows[seed]["kinds"]) for seed in seeds]
        counts = [len(self.rows[seed]["right"]) for seed in seeds]
        return [k for turn, n in zip(turns, counts, strict=True) for k in itertools.islice(turn, n)]

    def mean(self, field: str, seeds: Iterable[int]) -> float:
        """Mean of a figure over seeds."""
        found = [self.rows[seed][field] for seed in seeds]
        return float(sum(found) / len(found))


Gathered = dict[Key, MethodAnswers]


def gather(cells: Iterable[Row]) -> tuple[Gathered, dict[Key, Row]]:
    """Sort cells into answers and times, the latest of each; failed ones are left out.

    Answers to other questions or of other weights than those of the latest stock model are left
    out as well: nothing could be read beside them.
    """
    found: dict[Key, dict[int, Row]] = {}
    speeds: dict[Key, Row] = {}
    for row in cells:
        key = (row["media"], row["method"], row["budget"])
        if "error" in row:
            continue
        if row["job"] == SPEED:
            speeds[key] = row
        elif row["job"] == ANSWERS:
            found.setdefault(key, {})[row["seed"]] = row
    gathered = Gathered()
    for key, rows in found.items():
        stock = found.get((key[0], STOCK, 1.0), {})
        mine = {seed: r for seed, r in sorted(rows.items()) if _alike(r, stock.get(seed))}
        if mine:
            gathered[key] = MethodAnswers(mine)
    return gathered, speeds


def _alike(row: Row, stock: Row | None) -> bool:
    return stock is not None and all(row[key] == stock[key] for key in ("n", "weights"))


def standing(cells: Sequence[Row], planned: Mapping[str, Any] | None = None) -> Row:
    """Return the document of the leaderboard from its cells.

    `rows` has one entry for each suite, method and budget; `ranks` those of a suite at a budget;
    `pairs` the methods that a paired test tells apart; `jobs` the method for each job; `failed` the
    cells without a result, with the reason. Their fields are listed in the guide.
    """
    answers, speeds = gather(cells)
    rows = [_row(key, answers, speeds.get(key)) for key in answers]
    for media in dict.fromkeys(key[0] for key in answers):
        mine = [row for row in rows if row["suite"] == media and row["p"] is not None]
        for row, p in zip(mine, holm([row["p"] for row in mine]), strict=True):
            row["p_holm"] = p
        _mark_fronts([row for row in rows if row["suite"] == media])
    ranks, pairs = list[Row](), list[Row]()
    for media, budget in dict.fromkeys((k[0], k[2]) for k in answers if k[1] != STOCK):
        found = compared(answers, media, budget)
        ranks, pairs = ranks + found[0], pairs + found[1]
    latest = {tuple(_named(row).values()): row for row in cells}.values()
    failed = [{**_named(row), "error": row["error"]} for row in latest if "error" in row]
    document: Row = {"suite": "leaderboard", "grid": planned, **_measured_on(cells)}
    document |= {"rows": rows, "ranks": ranks, "pairs": pairs}
    return document | {"jobs": jobs(answers, rows), "failed": failed}


def _named(row: Row) -> Row:
    return {key: row[key] for key in ("job", "media", "method", "budget", "seed")}


def _measured_on(cells: Sequence[Row]) -> Row:
    """Versions, commits, dates and processors behind the cells, each once."""
    found: Row = {}
    for key in ("processor", "commit", "date", "versions", "threads"):
        known = {str(row[key]): row[key] for row in cells if row.get(key)}
        found[key] = [*known.values()]
    loads = [row["load"] for row in cells if row.get("load") is not None]
    seconds = round(sum(row.get("seconds", 0.0) for row in cells), 1)
    return {**found, "load": median(loads) if loads else None, "seconds": seconds}


def _row(key: Key, answers: Gathered, speed: Row | None) -> Row:
    media, method, budget = key
    mine, stock = answers[key], answers[media, STOCK, 1.0]
    seeds = [*mine.rows]
    last = mine.rows[seeds[-1]]
    right, before = mine.flags(seeds), stock.flags(seeds)
    n, kinds = len(right), mine.kinds(seeds)
    name = {field: _bare(last[field]) for field in ("reduce", "cache")}
    row: Row = {"suite": media, "method": method, "budget": budget, **name, "n": n, "seed": seeds}
    row |= {"model": last["model"], "weights": last["weights"]}
    row |= {"score": float(right.mean()), "accuracy": float(right.mean())}
    row |= {"interval": interval(int(right.sum()), n)}
    row |= {"by_kind": shares(zip(kinds, right.tolist(), strict=True))}
    row |= _beside(before, right, method)
    row |= {"kept": mine.mean("kept", seeds), "kv_bytes": mine.mean("kv_bytes", seeds)}
    row["kept_share"] = row["kept"] / stock.mean("kept", seeds)
    row |= {name: _ability(right, kinds, of) for name, of in ABILITIES.items()}
    row["agreement"] = float(mine.flags(seeds, "same").mean())
    chances = [each for seed in seeds for each in mine.rows[seed]["chances"]]
    row["calibration_error"] = calibration_error(chances, right.tolist())
    row["split"] = _split(answers.get((media, BASELINE, budget)), mine, stock, method)
    row |= _times(speed, method)
    return row | {"right": {str(s): mine.rows[s]["right"] for s in seeds}}


def _bare(spec: str | None) -> str | None:
    """A spec without the seed of its cell."""
    return None if spec is None else spec.partition("?seed=")[0]


def _beside(before: Flags, right: Flags, method: str) -> Row:
    """Difference to all tokens on the same questions, with its interval and McNemar's test."""
    if method == STOCK:
        return {"difference": None, "difference_interval": None, "p": None, "p_holm": None}
    pair = before.tolist(), right.tolist()
    found: Row = {"difference": float(right.mean() - before.mean()), "p": mcnemar(*pair)}
    return found | {"difference_interval": paired_interval(*pair), "p_holm": None}


def _ability(right: Flags, kinds: Sequence[str], of: Sequence[str]) -> Row | None:
    mine = right[np.array([kind in of for kind in kinds])]
    return _share(mine) if len(mine) else None


def _share(flags: Flags) -> Row:
    n = len(flags)
    found = {"n": n, "accuracy": float(flags.mean()) if n else None}
    return found | {"interval": interval(int(flags.sum()), n) if n else None}


def _split(
    base: MethodAnswers | None, mine: MethodAnswers, stock: MethodAnswers, method: str
) -> Row | None:
    """VTC-Bench's split (arXiv 2510.07143): questions that downsampling answers, and the others.

    Only the second part says that a method is worth more than a smaller picture.
    """
    if base is None or method in (BASELINE, STOCK):
        return None
    seeds = [seed for seed in mine.rows if seed in base.rows]
    if not seeds:
        return None
    answered, right, whole = base.flags(seeds), mine.flags(seeds), stock.flags(seeds)
    return {
        name: {**_share(right[part]), "stock": _share(whole[part])["accuracy"]}
        for name, part in (("answered", answered), ("unanswered", ~answered))
    }


def _times(speed: Row | None, method: str) -> Row:
    """Times to the first token, and the gain over the stock model in the same rounds."""
    found: Row = {}
    for many in (1, 8):
        gains = [] if speed is None else speed[f"gains_{many}"]
        found[f"ttft_{many}_ms"] = None if speed is None else speed[f"ttft_{many}_ms"]
        gain = median(gains) if gains else 1.0 if method == STOCK else None
        found[f"ttft_{many}_share"] = None if gain is None else 1.0 / gain
        found[f"speedup_{many}"] = gain
        found[f"speedup_{many}_range"] = [min(gains), max(gains)] if gains else None
    return found | {"speed_load": None if speed is None else speed.get("load")}


def _mark_fronts(rows: Sequence[Row]) -> None:
    """Note in `fronts` the costs at which no row of the suite is better in both respects."""
    for row in rows:
        row["fronts"] = []
    for cost in COSTS:
        mine = [row for row in rows if row[cost] is not None]
        front = pareto([(row[cost], row["accuracy"]) for row in mine])
        for row, stands in zip(mine, front, strict=True):
            row["fronts"] += [cost] if stands else []


def common_seeds(
    mine: Mapping[str, MethodAnswers],
) -> tuple[tuple[int, ...], dict[str, MethodAnswers]]:
    """Seeds to compare methods on, and the methods that have them: the most answers in all.

    A run that was interrupted within a seed is compared on the seeds before it.
    """

    def having(seeds: tuple[int, ...]) -> dict[str, MethodAnswers]:
        return {name: each for name, each in mine.items() if set(seeds) <= each.rows.keys()}

    choices = {tuple(each.rows) for each in mine.values()}
    seeds = max(sorted(choices), key=lambda seeds: len(seeds) * len(having(seeds)))
    return seeds, having(seeds)


def compared(answers: Gathered, media: str, budget: float) -> tuple[list[Row], list[Row]]:
    """Ranks of the methods on a suite at a budget, and the pairs that are told apart.

    Methods take part that answered the questions of the same seeds (`common_seeds`).
    """
    mine = {k[1]: each for k, each in answers.items() if (k[0], k[2]) == (media, budget)}
    mine.pop(STOCK, None)
    seeds, full = common_seeds(mine)
    marks = {name: each.flags(seeds) for name, each in full.items()}
    place, pairs = {"suite": media, "budget": budget}, list[Row]()
    found = list(itertools.combinations(marks, 2))
    tests = [mcnemar(marks[a].tolist(), marks[b].tolist()) for a, b in found]
    for (a, b), p, sure in zip(found, tests, holm(tests), strict=True):
        if sure < SURE:
            better, worse = (a, b) if marks[a].sum() > marks[b].sum() else (b, a)
            won = int((marks[better] & ~marks[worse]).sum())
            lost = int((marks[worse] & ~marks[better]).sum())
            pair = {"better": better, "worse": worse, "won": won, "lost": lost}
            pairs.append({**place, **pair, "p": p, "p_holm": sure})
    rows, ranked = list[Row](), rank_intervals(np.stack([*marks.values()]))
    for name, (rank, *between) in zip(marks, ranked, strict=True):
        row = {**place, "method": name, "of": len(marks), "n": len(marks[name]), "rank": rank}
        row |= {"rank_interval": between, "beats": sum(p["better"] == name for p in pairs)}
        rows.append({**row, "beaten_by": sum(pair["worse"] == name for pair in pairs)})
    return sorted(rows, key=lambda row: float(row["rank"])), pairs


# Chooses questions, `[Q]`, by their kinds `[Q]` and their seeds.
Part = Callable[[Sequence[str], Sequence[int]], Flags]


def jobs(answers: Gathered, rows: Sequence[Row]) -> list[Row]:
    """Method for each job on each suite, with all that a test does not tell from it.

    Jobs of accuracy are judged at the smallest budget; those of cost at any budget at which the
    95 % interval of the loss ends within `LOSS`.
    """
    found = list[Row]()
    for media in dict.fromkeys(key[0] for key in answers):
        budget = min((k[2] for k in answers if k[0] == media and k[1] != STOCK), default=None)
        if budget is None:
            continue
        mine = {k[1]: each for k, each in answers.items() if (k[0], k[2]) == (media, budget)}
        for job, part in _parts(mine.get(BASELINE)).items():
            best = _best(mine, part)
            if best is not None:
                found.append({"suite": media, "job": job, "budget": budget, **best})
        found += _cheapest(media, [row for row in rows if row["suite"] == media])
    return found


def _parts(base: MethodAnswers | None) -> dict[str, Part]:
    """Parts of the questions that a job is about."""

    def of_kinds(of: Sequence[str]) -> Part:
        return lambda kinds, _: np.array([kind in of for kind in kinds])

    parts: dict[str, Part] = {"all questions": lambda kinds, _: np.ones(len(kinds), dtype=bool)}
    parts |= {name: of_kinds(of) for name, of in ABILITIES.items()}
    if base is not None:
        parts["unanswered by downsampling"] = lambda kinds, seeds: (
            ~base.flags(seeds) if set(seeds) <= base.rows.keys() else np.zeros(len(kinds), bool)
        )
    return parts


def _best(mine: Mapping[str, MethodAnswers], part: Part) -> Row | None:
    """Most accurate method on a part of the questions; None where the part is empty."""
    seeds, full = common_seeds(mine)
    chosen = part(next(iter(full.values())).kinds(seeds), seeds)
    if not chosen.any():
        return None
    marks = {name: each.flags(seeds)[chosen] for name, each in full.items()}
    best = max(marks, key=lambda name: int(marks[name].sum()))
    others = [name for name in marks if name != best]
    tests = holm([mcnemar(marks[best].tolist(), marks[name].tolist()) for name in others])
    tied = [name for name, p in zip(others, tests, strict=True) if p >= SURE]
    tied.sort(key=lambda name: -int(marks[name].sum()))
    found = {"method": best, **_share(marks[best]), "tied": tied, "of": len(marks)}
    return {**found, "decided": len(tied) < len(others)}  # from any other at all


_CHEAP = {
    "fewest tokens without loss": ("kept_share", False),
    "smallest cache without loss": ("kv_bytes", False),
    "first token soonest, one request": ("speedup_1", True),
    "first token soonest, eight at once": ("speedup_8", True),
}


def _cheapest(media: str, rows: Sequence[Row]) -> list[Row]:
    """Methods that save most among those whose loss is surely small."""
    safe = [row for row in rows if row["p"] is not None and row["difference_interval"][0] >= -LOSS]
    found = list[Row]()
    for job, (field, more) in _CHEAP.items():
        mine = [row for row in safe if row[field] is not None]
        if not mine:
            continue
        sign = 1 if more else -1  # of equal savings the most accurate
        best = max(mine, key=lambda row: (sign * row[field], row["accuracy"]))
        same = {row["method"] for row in mine if _as_cheap(row, best, field, more)}
        shown = {key: best[key] for key in ("method", "budget", "n", "accuracy", "interval")}
        figure = {"value": best[field], "field": field, "of": len(mine), "decided": True}
        tied = sorted(same - {best["method"]})
        found.append({"suite": media, "job": job, **shown, **figure, "tied": tied})
    return found


def _as_cheap(row: Row, best: Row, field: str, more: bool) -> bool:
    """Tell whether a saving is as large, for times within the range of the rounds."""
    if more:
        return bool(row[f"{field}_range"][1] >= best[f"{field}_range"][0])
    return bool(row[field] <= 1.001 * best[field])
