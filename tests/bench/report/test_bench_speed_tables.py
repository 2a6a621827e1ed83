"""Tables of kernels, reducers and the vision tower: what was measured, and what was not."""

from __future__ import annotations

from typing import Any

import pytest

from mmfast.bench.report.docs import write_table

WHERE = {"processor": "a chip", "date": "2026-01-01", "commit": "abc", "dtype": "bfloat16"}
SUMS = {
    **WHERE,
    "bench": "attention-column-sums",
    "case": "7B prefill of 6,336 tokens, 28 / 4 heads x 128",
    "way": "ours",
    "device": "cuda",
    "median_ms": 0.41,
}


def test_goals_of_kernels_take_the_latest_row_of_a_gpu() -> None:
    older = {**SUMS, "median_ms": 9.0}
    lines = write_table("kernels", [older, SUMS])
    assert [line for line in lines if "0.41 ms (a chip)" in line]
    assert not [line for line in lines if "9.00" in line]
    assert sum("not measured" in line for line in lines) == len(lines) - 3


@pytest.mark.parametrize(
    "other", [{"device": "cpu"}, {"way": "eager weights"}, {"case": "tiny"}, {"dtype": "float32"}]
)
def test_other_rows_say_nothing_about_a_goal(other: dict[str, Any]) -> None:
    assert write_table("kernels", [{**SUMS, **other}]) == write_table("kernels", [])


def test_reducers_are_listed_by_name_with_a_column_per_size() -> None:
    cost = {**WHERE, "bench": "reducers", "d": 1024, "operations": 12, "extra_mb": 3.4}
    rows = [
        {**cost, "method": "evs", "n": 6272, "median_ms": 1234.5},
        {**cost, "method": "evs", "n": 2880, "median_ms": 2.34},
        {**cost, "method": "divprune", "n": 6272, "median_ms": 50.0},
    ]
    lines = write_table("reducers", rows)
    assert lines[0].startswith("A quarter of 6,272 x 1,024 and 2,880 x 1,024 tokens")
    assert lines[-2:] == [
        "| `divprune` | 50 (12, 3) | not measured |",
        "| `evs` | 1,234 (12, 3) | 2.3 (12, 3) |",
    ]
    assert write_table("reducers", [SUMS]) == ["Not measured."]


def test_differences_below_the_noise_are_no_gain() -> None:
    shared = {
        **WHERE,
        "bench": "compile",
        "tower": "siglip",
        "layers": 2,
        "of_layers": 26,
        "device": "cpu",
        "noise": 0.02,
        "threads": 1,
    }
    stock = {**shared, "job": "stock", "median_ms": 100.0, "speedup": 1.0}
    fast = {**shared, "job": "fast", "median_ms": 99.0, "speedup": 1.01, "first_call_s": 0.1}
    slow = {**shared, "job": "compile", "median_ms": 120.0, "speedup": 0.83, "first_call_s": 50.2}
    text = "\n".join(write_table("encoder", [stock, fast, slow]))
    part = "| siglip, 2 of 26 blocks, cpu"
    assert f"{part} | stock | 100 | 1 |  |" in text
    assert f"{part} | fast | 99 | = | 0 |" in text
    assert f"{part} | compile | 120 | 0.83x | 50 |" in text
    assert text.count("not measured") == 6  # the other benchmarks
