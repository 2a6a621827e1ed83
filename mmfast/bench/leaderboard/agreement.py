"""Agreement of two runs of the leaderboard, on two machines or of two versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmfast.bench.leaderboard.statistics import SURE, fisher, holm, newcombe
from mmfast.bench.own_data import mcnemar, paired_interval
from mmfast.bench.results import Row
from mmfast.core.errors import MmfastError

_FIELDS = ("suite", "method", "budget", "n", "accuracy", "right", "model", "weights")


def read_board(path: Path) -> Row:
    """Read a document that `mmfast leaderboard` wrote; MmfastError where it is none."""
    told = "give a leaderboard.json that mmfast leaderboard wrote"
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "no UTF-8 text"
        raise MmfastError(f"cannot read {str(path)!r} ({why}); {told}") from None
    except (ValueError, RecursionError) as error:
        raise MmfastError(f"{str(path)!r} is no JSON ({error}); {told}") from None
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or document.get("suite") != "leaderboard":
        raise MmfastError(f"{str(path)!r} is no leaderboard; {told}")
    for row in rows:
        lacking = [key for key in _FIELDS if not isinstance(row, dict) or key not in row]
        if lacking or not isinstance(row["right"], dict):
            raise MmfastError(
                f"a row of {str(path)!r} has no {(lacking or ['right'])[0]!r}; {told}"
            )
    found: Row = document
    return found


def agree(first: Row, second: Row) -> Row:
    """Compare the accuracy of two runs row by row.

    Where both asked the same questions of the same weights, McNemar's exact test decides, else
    Fisher's; p is corrected over all rows by Holm. Times are no part of it: machines differ.

    Returns:
        `agree`, whether no row differs, and `rows` with the accuracy of both, the difference and
        its 95 % interval, `paired`, `same`, the share of equal marks, p, and `agree` of each row.

    Raises:
        MmfastError: No row is in both.
    """
    before, after = ({_place(row): row for row in each["rows"]} for each in (first, second))
    both = [place for place in before if place in after]
    if not both:
        raise MmfastError("the two leaderboards share no suite, method and budget; compare others")
    rows = [_compared(before[place], after[place]) for place in both]
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        low, high = row["difference_interval"]
        row |= {"p_holm": p, "within": low <= 0.0 <= high, "agree": p >= SURE}
    alone = {
        "only_first": [list(place) for place in before if place not in after],
        "only_second": [list(place) for place in after if place not in before],
    }
    document: Row = {"agree": all(row["agree"] for row in rows), "n": len(rows)}
    document |= {"outside": sum(not row["within"] for row in rows)}
    return {**document, "differ": sum(not row["agree"] for row in rows), "rows": rows, **alone}


def _place(row: Mapping[str, Any]) -> tuple[str, str, float]:
    return row["suite"], row["method"], row["budget"]


def _compared(first: Row, second: Row) -> Row:
    seeds = [seed for seed in first["right"] if seed in second["right"]]
    seeds = [s for s in seeds if len(first["right"][s]) == len(second["right"][s])]
    paired = bool(seeds) and first["weights"] == second["weights"]
    row: Row = {"suite": first["suite"], "method": first["method"], "budget": first["budget"]}
    row |= {"first": first["accuracy"], "second": second["accuracy"], "paired": paired}
    if paired:
        a, b = (
            [bit == "1" for seed in seeds for bit in each["right"][seed]]
            for each in (first, second)
        )
        row |= {"n": len(a), "first": sum(a) / len(a), "second": sum(b) / len(b)}
        row |= {"same": sum(x == y for x, y in zip(a, b, strict=True)) / len(a)}
        between, p = paired_interval(a, b), mcnemar(a, b)
    else:
        counts = [(round(r["accuracy"] * r["n"]), int(r["n"])) for r in (first, second)]
        (right, n), (other, other_n) = counts
        row |= {"n": [n, other_n], "same": None}
        between, p = [*newcombe(right, n, other, other_n)], fisher(right, n, other, other_n)
    row |= {"difference": row["second"] - row["first"], "difference_interval": between}
    return {**row, "p": p}
