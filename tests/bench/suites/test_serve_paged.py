"""The benchmark beside transformers' continuous batching answers alike, or does not measure."""

from __future__ import annotations

from typing import Any

import pytest

from mmfast.bench.suites.serve import paged as serve_paged
from mmfast.core.errors import MmfastError


@pytest.mark.slow
def test_each_way_to_answer_is_measured() -> None:
    ticks: list[tuple[str, int, int]] = []
    rows = serve_paged.paged(lambda *tick: ticks.append(tick), rounds=1)
    jobs = {row["job"]: row for row in rows}
    assert set(jobs) == {"stock `generate`, one batch", "this engine", "`generate_batch`"}
    assert jobs["stock `generate`, one batch"]["to_stock"] == 1
    assert all(row["seconds"] > 0 and row["chats"] == 16 and row["n"] == 1 for row in rows)
    assert [number for _, number, _ in ticks] == [0, 1]


def test_other_answers_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = serve_paged._stock

    def wrong(model: Any, inputs: Any) -> list[list[int]]:
        rows = stock(model, inputs)
        rows[3][-1] += 1
        return rows

    monkeypatch.setattr(serve_paged, "_stock", wrong)
    with pytest.raises(MmfastError, match="answer differently"):
        serve_paged.paged(lambda *_: None, rounds=1)
