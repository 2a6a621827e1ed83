"""Bench of column sums: its ways agree, wrong sums stop it, rows say what they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmfast.bench.suites import column_sums as bench
from mmfast.bench.suites.column_sums import AttentionInputs, ColumnSumCase
from mmfast.core.errors import MmfastError

TINY = ColumnSumCase("tiny", 2, 4, 2, 40, 16, True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setitem(bench.CASES, "cpu", (TINY,))
    monkeypatch.setitem(bench.ROUNDS, "cpu", 2)
    monkeypatch.setattr(bench, "ceilings", lambda _: {"matmul_tflop_s": 0.1})


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("causal", [False, True])
def test_all_ways_agree(causal: bool) -> None:
    torch.manual_seed(0)
    case = ColumnSumCase("tiny", 2, 4, 2, 64, 16, causal)
    given = AttentionInputs.random(case, torch.float32, "cpu")
    exact = bench.exact_sums(given)
    found = {name: way(given) for name, way in bench.WAYS.items() if name != "sdpa alone"}
    found["flex"] = bench.swapped_flex(given, compiled=False)()
    for name, sums in found.items():
        torch.testing.assert_close(sums.double(), exact, atol=1e-4, rtol=0, msg=name)


def test_rows_of_a_tiny_case() -> None:
    seen: list[tuple[str, int, int]] = []
    rows = bench.column_sums(lambda *tick: seen.append(tick))
    assert seen == [("tiny", 0, 1), ("", 1, 1)]
    assert [row["way"] for row in rows] == list(bench.WAYS)
    assert {row["device"] for row in rows} == {"cpu"}
    assert all(row["median_ms"] > 0 and row["extra_mb"] >= 0 for row in rows)
    assert all(row["max_error"] < 1e-5 for row in rows if "ours" in row["way"])
    bases = [row for row in rows if row["way"].startswith("eager")]
    assert [row["speedup"] for row in bases] == [1.0, 1.0]


def test_wrong_sums_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(given: AttentionInputs) -> Tensor:
        return bench.ours(given) * 1.01

    monkeypatch.setitem(bench.WAYS, "ours", wrong)
    with pytest.raises(MmfastError, match="no speed is measured"):
        bench.column_sums(lambda *_: None)
