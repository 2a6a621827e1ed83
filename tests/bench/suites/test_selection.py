"""The comparison of selection costs: fields, agreement, and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
import torch

from mmfast import MmfastError
from mmfast.bench.cases import textured_video
from mmfast.bench.suites import selection
from mmfast.bench.suites.selection import (
    CASES,
    TEXTBOOKS,
    SelectionCase,
    SelectionJob,
    measure,
    method_case,
)


@pytest.mark.parametrize("method", ["divprune", "evs", "holitom_inner@llm2"])
def test_row(method: str) -> None:
    threads = torch.get_num_threads()
    (row,) = measure([method_case(method, (4, 6, 7), 32, 0.3)], repeats=2)
    assert row["same_indices"] and (row["n"], row["d"], row["budget"]) == (168, 32, 50)
    assert row["speedup"] == pytest.approx(row["textbook_ms"] / row["ms"])
    assert row["median_ms"] == row["ms"] > 0 and "keep 30%" in row["case"]
    assert json.dumps(row) and torch.get_num_threads() == threads


def test_disagreement_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TEXTBOOKS, "divprune", lambda tokens, budget: torch.arange(budget))
    (row,) = measure([method_case("divprune", (2, 6, 7), 16, 0.3)], repeats=1)
    assert not row["same_indices"]


def test_method_without_textbook() -> None:
    with pytest.raises(MmfastError, match="no textbook for 'pool'; choices: divprune"):
        list(measure([method_case("pool", (2, 2, 2), 4, 0.5)]))


def test_divprune_is_much_cheaper_than_the_textbook_loop() -> None:
    """A tenth of the contract's size; the ratio there is above 30, here a safe 2."""
    (row,) = measure([method_case("divprune", (16, 14, 14), 64, 0.25)], repeats=1)
    assert row["same_indices"] and row["speedup"] > 2
    assert textured_video((16, 14, 14), 64).n == row["n"]


SMALL: dict[str, Callable[[], SelectionJob]] = {
    "windows": partial(selection.segmentation, 40, 12),
    "importance of grouped heads": partial(selection.importance, 6, 2, 70, 16),
    "importance": partial(selection.importance, 3, 3, 50, 16),
    "head gather": partial(selection.head_gather, 3, 40, 11, 8),
}


@pytest.mark.parametrize("name", SMALL)
def test_operation_agrees_with_its_textbook(name: str) -> None:
    (row,) = measure([SelectionCase(name, "op", 40, 8, None, SMALL[name])], repeats=1)
    assert row["same_indices"] and row["case"] == name and row["budget"] is None
    assert row["noise"] >= 0 and ("extra_mb" in row) == name.startswith("importance")
    assert json.dumps(row)


@pytest.mark.parametrize("name", SMALL)
def test_operation_that_disagrees_shows(name: str) -> None:
    job = SMALL[name]()
    right, wrong = job.ours(), job.textbook()
    assert job.same(right, wrong)
    if isinstance(wrong, tuple):
        wrong = (wrong[0], wrong[1] + 1)
    else:
        wrong[..., 0] += 1
    assert not job.same(right, wrong)


def test_contract_is_covered() -> None:
    """What the speed proof promises is among the cases."""
    cases = {(case.method, case.n, case.d) for case in CASES}
    assert {("divprune", 6272, 1024), ("evs", 6272, 3584), ("importance", 2880, 128)} <= cases
    assert {("holitom_windows", 128, 196), ("head_gather", 6336, 128)} <= cases


@pytest.mark.parametrize("windows", [True, False], ids=["windows", "gather"])
def test_fast_path_beats_the_textbook_by_far(windows: bool) -> None:
    """The contract asks for 25 and 10 times; a loaded machine still shows 5 and 2.

    Load beside can only hide what the path gains, so one of five measurements has to show it.
    """
    build = partial(selection.segmentation, 96, 196)
    if not windows:
        build = partial(selection.head_gather, 4, 6336, 1584, 128)
    case, least = SelectionCase("c", "c", 0, 0, None, build), 5 if windows else 2
    found = (measure([case], repeats=3) for _ in range(5))
    assert any(row["speedup"] > least for (row,) in found)
