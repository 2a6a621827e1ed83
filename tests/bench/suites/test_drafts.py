"""The benchmark of drafts on few clips and a tiny shape."""

from __future__ import annotations

import pytest
import torch

from mmfast.bench.suites.drafts import Descriptions, acceptance_rows, cost_rows
from mmfast.ops.weight_forms import Int4Weights


@pytest.fixture(scope="module")
def asked() -> Descriptions:
    return Descriptions(2, 24)


def test_acceptance_is_measured_without_labels(asked: Descriptions) -> None:
    views = ("self:0.5", "self:0.1?weights=int4", "self?reduce=random:0.1", "lookup")
    some, light, less, found = rows = acceptance_rows(asked, views)
    assert [row["job"] for row in rows] == [*views]
    assert all(row["same_tokens"] for row in rows)
    assert some["acceptance"] == some["accepted"] / some["proposed"]
    said = sum(ids.shape[1] - 1 for ids in asked.whole)
    assert some["tokens_a_pass"] == pytest.approx(said / (said - some["accepted"]))
    assert light["acceptance"] > 0.5 and 0 <= less["accepted"] <= less["proposed"] <= said
    assert found["proposed"] >= found["accepted"]


def test_a_change_of_what_is_said_is_seen(
    asked: Descriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "whole", [torch.zeros_like(ids) for ids in asked.whole])
    assert not asked.drafted("self:0.5", 2)["same_tokens"]


def test_cost_joins_times_and_tokens_of_a_pass() -> None:
    views = {"self:0.25": {1: 1.9, 4: 4.0}, "self?weights=int4": {1: 2.0, 4: 5.0}}
    known, light = cost_rows("tiny", 400, views, {"self:0.25": 0.9}, 1)
    for row in (known, light):
        gain = row["tokens_a_pass"] * row["step_ms"]
        gain /= row["drafts"] * row["draft_ms"] + row["verify_ms"]
        assert row["speedup"] == pytest.approx(gain) and row["drafts"] in (1, 4)
        assert row["tokens_a_pass"] == views[row["job"]][row["drafts"]]
    assert known["acceptance"] == 0.9 and light["acceptance"] is None
    assert light["ideal"] > known["ideal"]


def test_drafts_are_timed_on_their_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    read, product = list[int](), Int4Weights.product

    def seen(self: Int4Weights, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        read.append(len(x))
        return product(self, x, bias)

    monkeypatch.setattr(Int4Weights, "product", seen)
    cost_rows("tiny", 40, {"self:0.25": {2: 1.5}}, {}, 1)
    assert not read
    cost_rows("tiny", 40, {"self:0.25?weights=int4": {2: 1.5}}, {}, 1)
    assert set(read) == {1}
