"""Tables of `mmfast leaderboard`: ranks of a suite, and a method for each job."""

from __future__ import annotations

import json
from functools import lru_cache

from mmfast.bench.leaderboard.grid import STOCK
from mmfast.bench.leaderboard.standing import gather, standing
from mmfast.bench.report.table import NOT_MEASURED, ReportTable, Rows, score, stamp
from mmfast.bench.results import Row

_SHOWN = 5  # methods that are listed as not told apart


@lru_cache(maxsize=2)
def _standing(cells: str) -> Row:
    return standing(json.loads(cells))


def _document(rows: Rows) -> Row:
    """The standing of rows; what stands above a table asks for that of the table again."""
    return _standing(json.dumps(rows))


def _ranked(rows: Rows) -> list[Row]:
    """Methods of one suite at its smallest budget, by rank."""
    document = _document(rows)
    budget = min((row["budget"] for row in document["ranks"]), default=None)
    known = {(row["method"], row["budget"]): row for row in document["rows"]}
    ranked = [row for row in document["ranks"] if row["budget"] == budget]
    return [{**known[rank["method"], rank["budget"]], **rank} for rank in ranked]


def _part(row: Row | None) -> str:
    return NOT_MEASURED if row is None or row["accuracy"] is None else score(row, "accuracy", 0)


def _rank(row: Row) -> str:
    return "{:g} ({:g} to {:g})".format(row["rank"], *row["rank_interval"])


def _gain(row: Row) -> str:
    return f"{row['speedup_1']:.2f}x" if row["speedup_1"] else NOT_MEASURED


def _above(rows: Rows) -> str:
    document = _document(rows)
    stock = next((row for row in document["rows"] if row["method"] == STOCK), None)
    budget = min((row["budget"] for row in document["ranks"]), default=None)
    if stock is None or budget is None:
        return f"{NOT_MEASURED}."
    seeds = ", ".join(map(str, stock["seed"]))
    asked = f"{stock['n']} questions, seeds {seeds}, {100 * budget:g} % of the tokens"
    return f"**{stock['suite']}**: {asked}. All tokens: {score(stock)}."


def _below(rows: Rows) -> str:
    busy = [row["load"] for row in rows if row["job"] == "speed" and row.get("load")]
    load = f" Times at a load of {max(busy):.1f} a processor, so unreliable." if busy else ""
    return f"Right answers in per cent, in brackets 95 % intervals, {stamp(*rows)}.{load}"


def _jobs(rows: Rows) -> list[Row]:
    found = list[Row]()
    for job in _document(rows)["jobs"]:
        tied, more = job["tied"][:_SHOWN], len(job["tied"]) - _SHOWN
        names = ", ".join(f"`{name}`" for name in tied) + (f" and {more} more" if more > 0 else "")
        names = names or ("none" if job["of"] > 1 else "the only one measured")
        found.append({**job, "names": names, "share": 100 * job["budget"]})
    return found


def _measured(rows: Rows) -> str:
    """Name of every suite with the number of methods that were measured on it."""
    counts: dict[str, set[str]] = {}
    for suite, method, _ in gather(rows)[0]:
        counts.setdefault(suite, set()).add(method)
    told = ", ".join(f"{len(names) - 1} on {suite}" for suite, names in counts.items())
    return f"Methods measured so far: {told}; everything else of the grid is not measured."


TABLES: dict[str, tuple[ReportTable, ...]] = {
    "leaderboard": (
        ReportTable(
            "leaderboard",
            {
                "method": "`{method}`",
                "rank": _rank,
                "right": score,
                "beats": "{beats}",
                "beaten by": "{beaten_by}",
                "unanswered by downsampling": lambda row: _part(
                    (row["split"] or {}).get("unanswered")
                ),
                "text": lambda row: _part(row["text"]),
                "order": lambda row: _part(row["order"]),
                "as all tokens": lambda row: f"{100 * row['agreement']:.1f}",
                "calibration error": "{calibration_error:.3f}",
                "KV": lambda row: f"{row['kv_bytes'] / 1e6:.2f} MB",
                "first token": _gain,
            },
            split=("media",),
            lines=_ranked,
            before=_above,
            after=_below,
        ),
    ),
    "leaderboard_jobs": (
        ReportTable(
            "leaderboard",
            {
                "suite": "{suite}",
                "job": "{job}",
                "method": lambda row: (
                    f"`{row['method']}`" if row["decided"] else f"any; highest: `{row['method']}`"
                ),
                "budget": "{share:g}%",
                "right": lambda row: score(row, "accuracy", 0),
                "questions": "{n}",
                "not told apart from it": "{names}",
            },
            lines=_jobs,
            before=_measured,
        ),
    ),
}
