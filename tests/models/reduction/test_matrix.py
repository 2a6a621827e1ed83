"""Every method on every family: it runs, keeps its budget, and leaves the model as it was.

`pytest -m matrix --matrix-out assets/results/matrix.jsonl` writes what ran; the README's matrix is
made from that file.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from matrix_cells import REASONS, SHARE, SOUND, Cell, cells, prompt, recorded, spec_of
from tiny_models import ALL_FAMILIES, generate

import mmfast
from mmfast import ModelError, SpecError, Trace
from mmfast.attach import attach
from mmfast.bench.report.docs import write_table
from mmfast.core.registry import get
from mmfast.core.spec import count


@pytest.mark.rest_is_slow(5)
@pytest.mark.matrix
@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell.id)
def test_cell(cell: Cell, note_cell: Callable[[Cell, str], None]) -> None:
    method = get(cell.method)
    spec = spec_of(method, cell.site)
    this, inputs, stock = prompt(cell.family, cell.kind, 2 if method.scope == "prompt" else 1)
    try:
        with attach(this.model, spec) as trace:
            out = generate(this, inputs, 3)
    except (ModelError, SpecError) as error:
        reason = next((why for said, why in REASONS.items() if re.search(said, str(error))), "")
        assert reason, f"{spec} on {cell.family}: {error}"
    else:
        reason = SOUND if cell.kind == "audio" and cell.site in ("pixel", "vit") else ""
        if reason:
            assert all(reduction.m == reduction.n for _, _, reduction in trace.reductions)
        else:
            check_budgets(trace, method.scope, method.resizes)
        assert len(out.logits) == 3
        assert all(bool(step.isfinite().all()) for step in out.logits)
    with torch.no_grad():
        assert torch.equal(this.model(**inputs).logits, stock)
    note_cell(cell, reason)
    assert recorded().get(cell, reason) == reason, "write the matrix anew: see above"


def check_budgets(trace: Trace, scope: str, resizes: bool = False) -> None:
    """What is left of every item, or of all together, is what the budget says."""
    entered: dict[int, int] = {}
    left: dict[int, int] = {}
    for _, item, reduction in trace.reductions:
        entered.setdefault(item, reduction.n)
        left[item] = reduction.m
    assert entered
    if scope == "prompt":
        assert sum(left.values()) == count(SHARE, sum(entered.values()))
    elif resizes:  # the largest raster within the budget
        assert all(0 < left[item] <= (count(SHARE, n) or 0) for item, n in entered.items())
    else:
        assert left == {item: count(SHARE, n) for item, n in entered.items()}


def test_the_recorded_matrix_is_complete() -> None:
    """Every method and family of today, and none of yesterday."""
    if not recorded():
        pytest.skip("no matrix is recorded yet")
    assert set(recorded()) == set(cells())


def test_every_reason_is_met() -> None:
    """A footnote that no cell needs any more goes away."""
    if not recorded():
        pytest.skip("no matrix is recorded yet")
    met = {reason for reason in recorded().values() if reason}
    assert met == {*REASONS.values(), SOUND}


def test_every_family_runs_most_methods() -> None:
    if not recorded():
        pytest.skip("no matrix is recorded yet")
    for family in ALL_FAMILIES:
        ran = {c.method for c, reason in recorded().items() if c.family == family and not reason}
        assert len(ran) >= 0.6 * len(mmfast.methods("reducer"))


def test_the_table_ticks_what_ran_and_counts_reasons() -> None:
    def row(site: str, family: str, kind: str, reason: str) -> dict[str, str]:
        named = {"method": "saint", "site": site, "family": family, "kind": kind}
        return {**named, "reason": reason}

    rows = [
        row("pre", "a", "image", ""),
        row("vit", "a", "image", "no tower"),
        row("pre", "b", "image", ""),
        row("pre", "c", "image", "no luck"),
    ]
    lines = write_table("matrix", rows)
    assert lines[0].startswith("2 of 4 cells")
    assert lines[2] == "| method | `a` | `b` | `c` |"
    assert "| `saint` | ✓<sup>1</sup> | ✓ | <sup>2</sup> |" in lines
    assert "| `tome` | not run | not run | not run |" in lines
    assert lines[-2:] == ["<sup>1</sup> at `vit`: no tower.<br>", "<sup>2</sup> no luck.<br>"]
    assert write_table("matrix", []) == ["Not measured."]
