"""The benchmark of policies that choose at every step in the server, and its figures."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mmfast.bench.suites.serve import mix
from mmfast.models.kv.selection import Selection


@pytest.mark.slow
def test_every_spec_is_measured_beside_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "_TOKENS", 4)
    monkeypatch.setattr(mix, "CHATS", 3)
    monkeypatch.setattr(mix, "CHOOSING", (mix.CHOOSING[0], mix.CHOOSING[-1]))
    specs = ["quest:0.1", "self:0.1?tree=dynamic"]
    rows = mix.choosing(lambda *_: None, rounds=1)
    assert [row["job"] for row in rows[1:]] == ["no spec", *specs]
    assert all(row["seconds"] > 0 and row["noise"] >= 0 for row in rows)
    assert rows[1]["to_plain"] == 1 and rows[0]["to_stock"] == 1
    stock = Selection.attend

    def slow(self: Selection, *given: Any) -> Any:
        end = time.process_time() + 0.03
        while time.process_time() < end:  # planted: 30 ms a layer and row
            pass
        return stock(self, *given)

    monkeypatch.setattr(Selection, "attend", slow)
    slower = mix.choosing(lambda *_: None, rounds=1)
    assert slower[2]["to_plain"] > rows[2]["to_plain"] + 1
    assert slower[3]["to_plain"] < rows[2]["to_plain"] + 1  # drafts meet none of it
