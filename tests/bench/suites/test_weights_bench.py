"""Rows of packed weights on a tiny shape."""

from __future__ import annotations

import pytest
import torch

from mmfast.bench.report.docs import write_table
from mmfast.bench.suites.step_selection import LongCache, selection_rows
from mmfast.bench.suites.weights import at_once_rows, joint_rows, product_rows, weight_rows


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


def test_joint_products_beside_separate_ones() -> None:
    rows = joint_rows("tiny", 2, ("int8", "bfloat16"), 3)
    assert [row["job"] for row in rows] == ["int8", "bfloat16"]
    for row in rows:
        assert row["n"] == 3 and row["base_ms"] > 0 and row["prefill_speedup"] > 0
    shared = {"suite": "decode", "bench": "weights-joint", "processor": "p", "date": "d"}
    table = "\n".join(write_table("decode", [{**shared, "commit": "c", **row} for row in rows]))
    assert "| tiny, bfloat16 | `int8` |" in table


def test_steps_of_several_answers_beside_stock_products() -> None:
    alone, four = at_once_rows("tiny", (1, 4), 20, 3)
    assert (alone["batch"], four["batch"]) == (1, 4) and four["base_ms"] > 0
    shared = {"suite": "decode", "bench": "few-rows", "processor": "p", "date": "d", "commit": "c"}
    table = "\n".join(write_table("decode", [{**shared, **four}]))
    assert "| tiny | 4 | 20 |" in table


def test_selection_beside_packed_weights() -> None:
    """What a step reads of both is counted, and compared with the stock step in float32."""
    cache = LongCache(96, ("quest:0.5",), 2, (("int8", "quest:0.5"), ("int4", "quest:0.5")))
    floor, plain, eight, four = selection_rows("tiny", torch.float32, cache)
    assert floor["job"] == "no cache" and plain["job"] == "quest:0.5"
    assert eight["job"] == "quest:0.5, weights int8" and "attention_speedup" not in eight
    assert plain["weights_mb"] > 4 * eight["weights_mb"] > 4 * four["weights_mb"] > 0
    whole = plain["weights_mb"] + plain["cache_mb"]
    read = eight["weights_mb"] + eight["read_mb"]
    assert eight["ideal"] == pytest.approx(whole / read, rel=1e-3)
    assert eight["speedup"] > 0 and 0 < eight["read_share"] < 1
    table = {"suite": "decode", "bench": "selection", "processor": "p", "date": "d", "commit": "c"}
    told = "\n".join(write_table("decode", [{**table, **row} for row in (floor, plain, eight)]))
    assert "| `quest:0.5, weights int8` |" in told


@pytest.mark.parametrize("rows", [1, 3])
def test_products_of_every_kernel(rows: int) -> None:
    found = {row["job"]: row for row in product_rows((128, 64, 2), rows, rounds=3)}
    assert {"float32", "`int8`", "int8pack, float32 rows", "int4pack, float32 rows"} <= {*found}
    assert found["float32"]["error"] < 1e-5 < found["`int8`"]["error"] < 0.02
    assert all(row["rows"] == rows and row["median_ms"] > 0 for row in found.values())
