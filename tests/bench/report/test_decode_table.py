"""Tables of `mmfast bench --decode`: noise prints as `=`, what was not measured says so."""

from __future__ import annotations

from typing import Any

from mmfast.bench.report.docs import write_table

BASIS = {"processor": "CPU", "date": "2026-01-01", "commit": "abc", "clock": "processor time"}


def _table(bench: str, *rows: dict[str, Any]) -> list[str]:
    lines = write_table("decode", [{**BASIS, "bench": bench, **row} for row in rows])
    return [line for line in lines if line.startswith("| ")]


def test_overhead_below_the_noise_is_none() -> None:
    row = {
        "preset": "tiny",
        "device": "cpu",
        "job": "evs:0.25",
        "work": "none",
        "twin_ms": 2.5,
        "overhead": 0.004,
        "overhead_us": 10.0,
        "noise": 0.01,
        "noise_us": 25.0,
    }
    lines = _table("hooks", row, {**row, "job": "quant:8", "work": "unpacks", "overhead": 0.5})
    two = _table("hooks", {**row, "job": "evs:0.25 | snapkv:0.5"})
    assert "| `evs:0.25 \\| snapkv:0.5` |" in two[1]  # one cell, not two
    assert "| = | +10 | 1.0 %, 25 |" in lines[1] and "unpacks | 2.5 | +50.0 % |" in lines[2]


def test_a_frame_without_a_time_is_not_measured() -> None:
    row = {"preset": "moshi-7b", "job": "graphs", "batch": 1, "device": "not measured"}
    lines = _table("moshi-frame", {**row, "mb": 16481.3, "median_ms": None, "goal_ms": 6.5})
    assert "not measured |  | 16.5 GB | 6.5 |" in lines[1]
    timed = {"device": "cuda", "median_ms": 5.0, "p99_ms": 5.5, "floor_ms": 3.8}
    lines = _table("moshi-frame", {**row, **timed, "goal_ms": 6.5, "same_codes": 1.0})
    assert "| cuda | 1 | graphs | 5.00 | 5.50 | 3.80 ms | 6.5 | 100 % |" in lines[1]


def test_compiled_steps_show_graphs_and_breaks() -> None:
    row = {
        "preset": "tiny",
        "device": "cpu",
        "reduce": None,
        "eager_ms": 3.0,
        "compiled_ms": 1.0,
        "speedup": 3.0,
        "graphs": 1,
        "breaks": 0,
        "recompiles": 0,
        "recompiles_attached_anew": 0,
        "same_tokens": True,
        "compile_s": 9.0,
    }
    lines = _table("compiled", row)
    assert "| stock | 3.00 | 1.00 | 3.00x | 1 / 0 / 0 / 0 | yes | 9 |" in lines[1]
