"""Cells of a leaderboard made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KINDS = ("colour", "number", "first", "count", "position")


def cell(
    method: str,
    right: Sequence[bool] | str,
    budget: float = 0.1,
    suite: str = "video",
    seed: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """A row of answers; a mark is True or "1" where the answer was right."""
    bits = "".join("1" if mark in (True, "1") else "0" for mark in right)
    share = 1.0 if method == "all tokens" else budget
    spec = None if method == "all tokens" else f"{method}:{budget}"
    row: dict[str, Any] = {"suite": "leaderboard", "key": f"{method}{budget}{suite}{seed}"}
    row |= {"job": "answers", "media": suite, "method": method, "budget": share, "reduce": spec}
    row |= {"cache": None, "seed": seed, "n": len(bits), "model": "tiny-video", "weights": "w"}
    row |= {"kinds": [*KINDS], "right": bits, "same": bits, "chances": [0.9] * len(bits)}
    row |= {"kept": 288 * share, "kv_bytes": 8000 * share, "seconds": 1.0, "load": 0.5}
    row |= {"processor": "made up", "commit": "abc", "date": "2026-01-01", "threads": 1}
    return row | {"versions": {"mmfast": "0"}} | more


def speed(method: str, gain: float, budget: float = 0.1, suite: str = "video") -> dict[str, Any]:
    """A row of times of three rounds, 5 % around a gain."""
    row = {"suite": "leaderboard", "job": "speed", "media": suite, "method": method}
    row |= {
        "commit": "abc",
        "date": "2026-01-01",
        "budget": budget,
        "seed": 1,
        "load": 0.5,
        "n": 3,
        "key": f"{method}{budget}speed",
    }
    for many in (1, 8):
        row |= {f"ttft_{many}_ms": 100 * many / gain, f"stock_ttft_{many}_ms": 100.0 * many}
        row[f"gains_{many}"] = [0.95 * gain, gain, 1.05 * gain]
    return row
