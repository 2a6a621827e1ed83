"""Accuracy rows of the package, by method and budget."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from mmfast.demos.examples import RESULTS

SUITES = {
    "clips": "video",
    "pictures": "image",
    "three pictures": "multi-image",
    "pages": "document",
}


@dataclass(frozen=True)
class Measurement:
    """One measurement: `accuracy` (0 to 1, with its 95 % interval) at a `share` of the tokens."""

    share: float
    accuracy: float
    low: float
    high: float
    tokens: float


@dataclass(frozen=True)
class SuiteCurves:
    """Measurements on one kind of media; `full` is with all tokens, `curves` is by method."""

    full: Measurement
    curves: dict[str, tuple[Measurement, ...]]
    source: str


@cache
def suite(name: str) -> SuiteCurves:
    """The newest rows of a suite: every method's budgets, ascending."""
    path = RESULTS / f"eval-{SUITES[name]}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    full, curves = None, dict[str, dict[float, Measurement]]()
    for row in rows:
        point = _point(row)
        if row["reduce"] is None:
            full = point
            source = (
                f"{row['n']} questions, model {row['model']}, seed {row['seed']}, {row['date']}"
            )
        elif point.share < 1 and "+" not in row["reduce"]:
            curves.setdefault(row["reduce"].rpartition(":")[0], {})[point.share] = point
    if full is None:
        raise ValueError(f"{path.name} has no row with all tokens")
    ordered = {
        method: tuple(points[share] for share in sorted(points))
        for method, points in sorted(curves.items())
    }
    return SuiteCurves(full, ordered, source)


def _point(row: dict[str, Any]) -> Measurement:
    name, _, budget = str(row["reduce"] or "all:1.0").rpartition(":")
    low, high = row["interval"]
    share = float(budget) if name and "." in budget else 1.0
    return Measurement(share, float(row["accuracy"]), low, high, float(row["kept"]))
