"""The comparison of selection costs: fields, agreement, and errors."""

from __future__ import annotations

import json

import pytest
import torch

from mmfast import MmfastError
from mmfast.bench.selection import TEXTBOOKS, Case, measure, video


@pytest.mark.parametrize("method", ["divprune", "evs", "holitom_inner@llm2"])
def test_row(method: str) -> None:
    threads = torch.get_num_threads()
    (row,) = measure([Case(method, (4, 6, 7), 32, 0.3)], repeats=2)
    assert row["same_indices"] and (row["n"], row["d"], row["budget"]) == (168, 32, 50)
    assert row["speedup"] == pytest.approx(row["textbook_ms"] / row["ms"])
    assert row["median_ms"] == row["ms"] > 0 and "keep 30%" in row["case"]
    assert json.dumps(row) and torch.get_num_threads() == threads


def test_disagreement_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTBOOKS, "divprune", lambda tokens, budget: torch.arange(budget))
    (row,) = measure([Case("divprune", (2, 6, 7), 16, 0.3)], repeats=1)
    assert not row["same_indices"]


def test_method_without_textbook() -> None:
    with pytest.raises(MmfastError, match="no textbook for 'pool'; choices: divprune"):
        list(measure([Case("pool", (2, 2, 2), 4, 0.5)]))


def test_divprune_is_much_cheaper_than_the_textbook_loop() -> None:
    """A tenth of the contract's size; the ratio there is above 30, here a safe 2."""
    (row,) = measure([Case("divprune", (16, 14, 14), 64, 0.25)], repeats=1)
    assert row["same_indices"] and row["speedup"] > 2
    assert video((16, 14, 14), 64).n == row["n"]
