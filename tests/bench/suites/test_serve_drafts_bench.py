"""The benchmark of drafts in the server: the same text in every way, or it says so."""

from __future__ import annotations

from typing import Any

import pytest

from mmfast.bench.suites.serve import drafts as serve_drafts
from mmfast.decoding.speculation import plan_decode
from mmfast.serve.engine.decode import DecodeBatch
from mmfast.serve.engine.second_model import SecondModel


@pytest.mark.slow
def test_every_way_is_measured_beside_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = SecondModel.begin

    def whole(self: SecondModel, row: Any) -> None:
        """Read the prompt at once: answers are short, and the clock of a test machine is not."""
        begin(self, row)
        while self._coming:
            self.reader.unit(False)

    monkeypatch.setattr(SecondModel, "begin", whole)
    monkeypatch.setattr(serve_drafts, "TOKENS", 10)
    monkeypatch.setattr(serve_drafts, "AT_ONCE", 1)
    own = serve_drafts.WAYS[-2]  # drafts in every step
    monkeypatch.setattr(serve_drafts, "WAYS", ("none", "none again", "recycle", own))
    rows = serve_drafts.draft_rows(lambda *_: None, rounds=1, groups=1, passes=1)
    assert [row["job"] for row in rows] == ["none", "recycle", own] * 2
    assert all(row["same_tokens"] and row["cpu_ms_per_token"] > 0 for row in rows)
    assert rows[0]["proposed"] == 0 < rows[2]["proposed"] and rows[0]["to_plain"] == 1
    assert all(plan_decode(f"draft:x{way[6:]}") for way in serve_drafts._OWN)
    stock = DecodeBatch._chosen

    def wrong(self: DecodeBatch, rows: Any, logits: Any) -> Any:
        found = stock(self, rows, logits)
        for i, row in enumerate(rows):
            if row.drafts is not None:  # planted: another word under drafts
                found[i] = row.token = 7
        return found

    monkeypatch.setattr(DecodeBatch, "_chosen", wrong)
    monkeypatch.setattr(serve_drafts, "taught", lambda pair, *_: pair[0])
    rows = serve_drafts.draft_rows(lambda *_: None, rounds=1, groups=1, passes=1)
    assert [row["same_tokens"] for row in rows] == [True, False, False] * 2
