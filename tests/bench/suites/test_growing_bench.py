"""Steps on both caches are rows of one table."""

from __future__ import annotations

from mmfast.bench.registry import find
from mmfast.bench.report.docs import write_table
from mmfast.bench.results import environment
from mmfast.bench.suites.growing import OURS, ROWS, STOCK, growing_rows


def test_both_caches_are_timed_in_turn() -> None:
    assert find("decode", "growing")
    rows = growing_rows("tiny", ((1, 64), (2, 32)), 2)
    assert [(r["batch"], r["tokens"], r["job"]) for r in rows] == [
        (*size, job) for size in ((1, 64), (2, 32)) for job in (STOCK, OURS, ROWS)
    ]
    assert all(r["median_ms"] > 0 and r["n"] == 2 and r["noise"] >= 0 for r in rows)
    assert rows[0]["speedup"] == rows[3]["speedup"] == 1.0
    shared = {"suite": "decode", "bench": "growing", **environment()}
    told = "\n".join(write_table("decode", [{**shared, **r} for r in rows]))
    assert "| answers at once | entries of each | cache |" in told and "| growing |" in told
