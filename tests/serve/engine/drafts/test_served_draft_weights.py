"""A server that drafts on weights in fewer bits says what it says without, to all at once."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from scheduling import answers, ask, image, model_of

from mmfast.core.errors import MmfastError
from mmfast.models import packing
from mmfast.models.decoder import few_rows
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.packing import PackedLinear
from mmfast.ops.weight_forms import Int4Weights
from mmfast.serve.engine.base import Finish
from mmfast.serve.engine.scheduler import Scheduler

FAMILY = "llava_onevision"  # its answers have no end, so that there is time to read a second prompt
FIXED = "adapt=false&least=0&most=3"
PART = f"self:0.2?weights=int4&{FIXED}"
SHORT = f"self?weights=int4&{FIXED}&reduce=divprune:0.3"


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of tiny models be packed, which are not worth it."""
    monkeypatch.setattr(packing, "SMALL", 64)


def scheduler(decode: str | None) -> Scheduler:
    return Scheduler(model_of(FAMILY), chunk=1024, memory="200MB", decode=decode)


def asked(*specs: str | None) -> list[Any]:
    return [
        ask(f"{number}", image(number), "Describe the picture.", tokens=40, decode=spec)
        for number, spec in enumerate(specs)
    ]


def counts(end: Any) -> tuple[int, int]:
    assert isinstance(end, Finish), end
    rows = [row for row in end.trace["rows"] if row["stage"] == "draft"]
    return sum(row["tokens_in"] for row in rows), sum(row["tokens_out"] for row in rows)


@pytest.mark.parametrize("spec", [PART, SHORT])
def test_answers_are_those_without_drafts(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one without drafts, whose step reads the weights of the model."""
    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, asked(None, None, None))]
    read, product = list[int](), Int4Weights.product

    def seen(self: Any, x: torch.Tensor) -> torch.Tensor:
        read.append(len(x))
        return product(self, x)

    monkeypatch.setattr(Int4Weights, "product", seen)
    with closing(scheduler(spec)) as made:
        found = answers(made, asked(None, "none", "self:0.2?adapt=false&least=0"))
        model = made._runner.model
        assert not any("forward" in vars(each) for each in model.modules())
        assert not any(isinstance(each, PackedLinear) for each in model.modules())
    assert [text for text, _ in found] == want
    (proposed, accepted), (none, _), _ = [counts(end) for _, end in found]
    assert read and proposed >= accepted > 0 and not none


def test_the_model_itself_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the packed weights are wrong, drafts fall and answers stay."""
    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, asked(None, None))]
    product = Int4Weights.product
    monkeypatch.setattr(Int4Weights, "product", lambda self, x: -product(self, x))
    with closing(scheduler(PART)) as made:
        found = answers(made, asked(None, None))
    assert [text for text, _ in found] == want
    assert all(p > 4 * a for p, a in (counts(end) for _, end in found))


@pytest.mark.parametrize(
    ("started", "spec", "words"),
    [
        (PART, "self?weights=int4", "would hold twice; give a share"),
        (None, "self:0.1?weights=int4", "start it with --decode 'self:0.1.weights=int4'"),
        (PART, "self:0.1?weights=int8", "does not hold"),
    ],
)
def test_what_the_server_does_not_hold_is_refused(
    started: str | None, spec: str, words: str
) -> None:
    with closing(scheduler(started)) as made, pytest.raises(MmfastError, match=words) as found:
        answers(made, asked(spec))
    assert "\n" not in str(found.value)


def test_a_server_does_not_start_with_a_form_that_there_is_not() -> None:
    with pytest.raises(MmfastError, match="unknown weights"):
        scheduler("self:0.1?weights=int5")
    with pytest.raises(MmfastError, match="would hold twice"):
        scheduler("self?weights=int4")
    assert DraftWeights(model_of(FAMILY)[0], "int4").nbytes > 0


def test_steps_of_several_answers_compute_few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(scheduler(None)) as made:
        want = [text for text, _ in answers(made, asked(None, None, None))]
    seen, stock = list[int](), few_rows.product

    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return stock(x, weight)

    monkeypatch.setattr(few_rows, "LARGE", 1)
    monkeypatch.setattr(few_rows, "paying_rows", lambda threads: frozenset(few_rows.ROWS))
    monkeypatch.setattr(few_rows, "product", product)
    with closing(scheduler(None)) as made:
        assert [text for text, _ in answers(made, asked(None, None, None))] == want
    assert seen and max(seen) <= 3
