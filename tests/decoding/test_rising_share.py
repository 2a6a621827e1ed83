"""Self-drafting whose share of the visual keys rises while the whole model takes too few drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.decoding.speculation import check_kind, plan_decode
from mmfast.models.decoder.draft_stage import RisingShare
from mmfast.models.kv.view import ViewStage

VARIED = {"repetition_penalty": 1.3}  # tiny models repeat themselves, and drafts would all stand


def share(text: str) -> RisingShare:
    plan = plan_decode(text)
    assert plan is not None
    return RisingShare(plan)


def test_the_share_doubles_on_evidence_alone() -> None:
    mine = share("self:0.1?rise=0.8")
    assert not mine.rises(7, 0)  # too few to tell
    assert mine.rises(1, 0) and mine.value == 0.2
    assert not mine.rises(0, 0) and not mine.rises(10, 8)
    assert mine.rises(10, 7) and mine.value == 0.4  # 15 of 20
    assert mine.rises(8, 0) and mine.value == 0.5
    assert not mine.rises(100, 0) and mine.value == 0.5  # a draft that reads more is none


def test_drafts_read_twice_as_much_after_an_answer_whose_drafts_fell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    this, views = tiny("llava_onevision"), list[float]()
    view = ViewStage.view

    def seen(stage: Any, cache: Any) -> Any:
        found = view(stage, cache)
        kept, whole = found.entries
        visual = int((inputs["input_ids"] == this.model.config.image_token_id).sum())
        layers = whole // inputs["input_ids"].shape[1]
        views.append((kept - whole + layers * visual) / (layers * visual))
        return found

    monkeypatch.setattr(ViewStage, "view", seen)
    inputs = this.inputs(["on {image} what?"], **this.media("image", 1, 0))
    want = generate(this, inputs, 12, **VARIED).sequences
    with attach(this.model, decode="self:0.1?adapt=0&least=0&rise=1.0") as trace:
        for _ in range(5):
            assert torch.equal(generate(this, inputs, 12, **VARIED).sequences, want)
    told = [row.method.rpartition(" at ")[2] for row in trace.rows if row.stage == "draft"]
    assert told[0] == "0.1" and told[-1] != told[0]
    assert views == pytest.approx([float(each) for each in told], abs=0.05)
    views.clear()
    with attach(this.model, decode="self:0.1?adapt=0&least=0&rise=0.0001"):
        generate(this, inputs, 12, **VARIED)
        generate(this, inputs, 12, **VARIED)
    assert views == pytest.approx([0.1, 0.1], abs=0.05)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("self:64?rise=0.8", "no share that could rise"),
        ("self?rise=0.8&reduce=divprune:0.1", "no share that could rise"),
        ("self:0.1?rise=2", "no probability"),
        ("recycle?rise=0.8", "unknown knob"),
    ],
)
def test_what_cannot_rise_is_refused(text: str, why: str) -> None:
    with pytest.raises(SpecError, match=why):
        plan_decode(text)


def test_no_server_lets_callers_raise_it() -> None:
    with pytest.raises(SpecError, match="learns from what all callers are told"):
        check_kind(plan_decode("self:0.1?rise=0.8"))
