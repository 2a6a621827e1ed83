"""Rows of the `stream` suite: shares of right answers by age and kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mmfast.tiny.statistics import interval
from mmfast.tiny.world_questions import KINDS, PAST

BANDS = ("now", "in the window", "1-3x", "3-10x", "10-30x", "over 30x")  # ages in windows
Mark = tuple[str, str, bool]


def row_of(
    memory: str | None, reduce: str | None, marks: Sequence[Mark], spent: Sequence[float]
) -> dict[str, Any]:
    """One memory's row.

    Args:
        memory: Its cache spec.
        reduce: Reducer of every frame.
        marks: Per question its band and kind, and whether the answer was right.
        spent: Milliseconds to the first delta of each answer.
    """
    ages, kinds = defaultdict(list), defaultdict(list)
    for band, kind, mark in marks:
        ages[band].append(mark)
        kinds[kind].append(mark)
    whole = [mark for *_, mark in marks]
    past = [mark for band, _, mark in marks if band in BANDS[2:]]
    return {
        "reduce": reduce,
        "memory": memory,
        "accuracy": sum(whole) / len(whole),
        "interval": interval(sum(whole), len(whole)),
        "by_kind": {k: sum(kinds[k]) / len(kinds[k]) for k in KINDS if kinds[k]},
        "by_age": {band: _share(ages[band]) for band in BANDS if ages[band]},
        "past": _share(past) if past else None,
        "past_by_kind": {
            kind: _share(mine)
            for kind in PAST
            if (mine := [mark for band, k, mark in marks if band in BANDS[2:] and k == kind])
        },
        "ttft_ms": sorted(spent)[len(spent) // 2],
    }


def _share(marks: Sequence[bool]) -> dict[str, Any]:
    return {
        "n": len(marks),
        "accuracy": sum(marks) / len(marks),
        "interval": interval(sum(marks), len(marks)),
    }


def relative(row: dict[str, Any], whole: dict[str, Any]) -> float | None:
    """Share of the unbounded cache's right answers, about facts older than the window."""
    if not row["past"] or not whole["past"]["accuracy"]:
        return None
    return float(row["past"]["accuracy"] / whole["past"]["accuracy"])
