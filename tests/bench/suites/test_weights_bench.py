"""Rows of packed weights on a tiny shape."""

from __future__ import annotations

import pytest

from mmfast.bench.report.docs import write_table
from mmfast.bench.suites.weights import product_rows, weight_rows


def test_steps_and_prompts() -> None:
    rows = weight_rows("tiny", 2, ("int8", "int4"), 3)
    assert [row["job"] for row in rows] == ["float32", "int8", "int4"]
    stock, eight, four = rows
    assert stock["speedup"] == 1 and stock["logit_error"] == 0
    assert 0 < eight["logit_error"] < 0.1 and eight["logit_error"] < four["logit_error"]
    assert eight["weights_mb"] < stock["weights_mb"] and eight["prefill_ms"] > 0
    shared = {"suite": "decode", "bench": "weights", "processor": "p", "date": "d", "commit": "c"}
    table = "\n".join(write_table("decode", [{**shared, **row} for row in rows]))
    assert "| tiny, cpu | `int8` |" in table


@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_every_kernel(rows: int) -> None:
    found = {row["job"]: row for row in product_rows((128, 64, 2), rows, rounds=3)}
    assert {"float32", "`int8`", "int8pack, float32 rows", "int4pack, float32 rows"} <= {*found}
    assert found["float32"]["error"] < 1e-5 < found["`int8`"]["error"] < 0.02
    assert all(row["rows"] == rows and row["median_ms"] > 0 for row in found.values())
