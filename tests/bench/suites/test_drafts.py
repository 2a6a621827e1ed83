"""The benchmark of drafts on few questions and a tiny shape."""

from __future__ import annotations

import pytest

from mmfast.bench.suites.drafts import acceptance_rows, cost_rows, expected_tokens


def test_acceptance_is_measured_without_labels() -> None:
    rows = acceptance_rows(("self:0.5", "self?reduce=random:0.1", "lookup"), n=2, tokens=6)
    some, less, found = rows
    assert [row["job"] for row in rows] == ["self:0.5", "self?reduce=random:0.1", "lookup"]
    assert all(row["same_tokens"] for row in rows)
    assert some["acceptance"] == some["accepted"] / some["proposed"]
    assert 0 <= less["accepted"] <= less["proposed"] <= 2 * 5
    assert found["proposed"] >= found["accepted"]


def test_cost_joins_times_and_acceptance() -> None:
    rows = cost_rows("tiny", 400, (0.25, 0.1), (1, 4), {"self:0.25": 0.9, "self:0.1": None}, 1)
    known, unknown = rows
    gain = expected_tokens(0.9, known["drafts"]) * known["step_ms"]
    gain /= known["drafts"] * known["draft_ms"] + known["verify_ms"]
    assert known["speedup"] == pytest.approx(gain) and known["drafts"] in (1, 4)
    assert "speedup" not in unknown and unknown["step_ms"] > 0


def test_expected_tokens_are_those_of_a_simulation() -> None:
    import random

    draws, total = random.Random(0), 0
    for _ in range(20_000):
        stood = 0
        while stood < 4 and draws.random() < 0.7:
            stood += 1
        total += stood + 1
    assert expected_tokens(0.7, 4) == pytest.approx(total / 20_000, rel=0.02)
