"""Benchmarks of training on few questions: what their rows say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmfast.attach import attach
from mmfast.bench.registry import names, quiet
from mmfast.bench.report.docs import write_table
from mmfast.bench.suites import training
from mmfast.tiny.evaluate import Subject

STAMP = {"suite": "train", "date": "2026-01-01", "commit": "abc", "processor": "EPYC"}


def test_all_are_found_by_name() -> None:
    assert names("train") == ["adapt", "drafts", "speed"]


def test_only_answers_are_labels() -> None:
    subject = Subject()
    (batch,) = training.lessons(subject, 1, 3)
    assert batch["labels"].shape == batch["input_ids"].shape == batch["attention_mask"].shape
    told = batch["labels"] != training.IGNORE
    assert torch.equal(batch["labels"][told], batch["input_ids"][told])
    assert bool((batch["attention_mask"][told] == 1).all())
    texts = [
        subject.processor.decode(row[mark]) for row, mark in zip(batch["labels"], told, strict=True)
    ]
    cases = training.suite(3, training.LESSONS)
    assert texts == [f"{case.answer}<|end|>" for case in cases]
    exam = {case.media for case in training.suite(8, training.EXAM)}
    assert not exam & {case.media for case in cases}


def test_saved_bytes_are_those_of_the_graph() -> None:
    x = torch.randn(1000, 25, requires_grad=True)
    kept = training.saved_mb(lambda: (x * x.clone()).sum())
    assert kept == pytest.approx(0.2)


@pytest.mark.slow
def test_a_step_with_fewer_tokens_is_faster_and_smaller(monkeypatch: Any) -> None:
    monkeypatch.setattr("mmfast.bench.timing.WARM_UPS", 1)
    monkeypatch.setattr(training, "SPECS", ("divprune:0.05",))
    rows = training.speed(quiet, rounds=3, batch=4)
    assert [row["job"] for row in rows] == ["all", "divprune:0.05"]
    assert rows[1]["speedup"] > 1.3 > 1 == rows[0]["speedup"]
    assert rows[1]["saved_mb"] < rows[0]["saved_mb"] / 3
    text = "\n".join(write_table("train", [{**STAMP, "bench": "speed", **r} for r in rows]))
    assert "| `divprune:0.05` |" in text


@pytest.mark.slow
def test_the_trainer_learns_at_a_budget() -> None:
    """The loss under the budget falls on what was trained."""
    subject = Subject()
    batches = training.lessons(subject, 6, 2)
    before = loss(subject.model, batches)
    training.fit(subject, batches, "tome:0.05", epochs=2)
    assert loss(subject.model.eval(), batches) < 0.9 * before


def loss(model: Any, batches: Any) -> float:
    with torch.no_grad(), attach(model, "tome:0.05"):
        return sum(float(model(**batch).loss) for batch in batches)


@pytest.mark.slow
def test_answers_before_and_after() -> None:
    rows = training.adapt(quiet, steps=2, batch=2, epochs=1, n=8)
    assert [row["reduce"] for row in rows] == [None, "visionzip:0.1", "visionzip:0.05"]
    assert [row["kept"] for row in rows] == [288, 29, 14]
    assert all(0 <= row["before"] <= 1 >= row["after"] for row in rows)
    text = "\n".join(write_table("train", [{**STAMP, "bench": "adapt", **r} for r in rows]))
    assert "| `visionzip:0.05`, 2 steps | `visionzip:0.1` | 29 |" in text


def test_rows_of_recipes_are_the_last_figures_of_their_logs() -> None:
    few = ("--steps", "40", "--prompts", "30", "--context", "24", "--length", "8")
    before, behind, first, second = training.drafters(quiet, few)
    assert [before["course"], behind["course"]] == ["untrained", "exit"]
    assert [first["course"], second["course"]] == ["texts alone", "answers"]
    assert before["drafted"] < behind["drafted"] and before["loss"] > behind["loss"]
    assert second["loss"] < first["loss"] and 0 <= second["drafted"] <= 1
    assert first["parameters"] * 4 < first["of"] and "of" not in before
    lines = write_table("learned_drafts", [{**STAMP, "bench": "drafts", **before, **second}])
    assert f"| {100 * second['drafted']:.1f} % | {second['parameters']:,} of" in lines[-1]


def test_figures_of_a_log_are_the_last_held_out_ones_of_each_course() -> None:
    steps = [
        {"stage": "untrained", "right": 0.1, "loss": 3.0},
        {"stage": "one", "step": 20, "right": 0.9, "loss": 0.1},
        {"stage": "held-out", "step": 20, "right": 0.2, "loss": 2.0},
        {"stage": "held-out", "step": 40, "right": 0.3, "loss": 1.0},
        {"stage": "two", "step": 20, "right": 0.8, "loss": 0.2},
        {"stage": "held-out", "step": 20, "right": 0.5, "loss": 0.5},
        {"stage": "saved", "parameters": 7},
    ]
    found = {name: row["drafted"] for name, row in training.held_out(steps).items()}
    assert found == {"untrained": 0.1, "one": 0.3, "two": 0.5}
