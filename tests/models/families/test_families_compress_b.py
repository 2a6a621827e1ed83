"""Reduced inputs give what `attach` gives: Qwen2-VL, the Omni thinker, Idefics3 and SmolVLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import facts, generate, tiny

from mmfast.attach import attach
from mmfast.core.trace import Trace
from mmfast.models.reduction.inputs import compress

FAMILIES = ("qwen2_vl", "qwen2_5_omni_thinker", "idefics3", "smolvlm")
CASES = [(family, kind) for family in FAMILIES for kind in facts(family).kinds]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.parametrize("spec", ["tome:0.3", "visionzip:0.5+divprune:0.5"])
def test_compressed_inputs_equal_attach(family: str, kind: str, spec: str) -> None:
    this = tiny(family)
    texts = ["a {}?", "{} and what else?", "{}{}."]
    texts = [text.replace("{}", f"{{{kind}}}") for text in texts]
    inputs = this.inputs(texts, **this.media(kind, 4))
    with attach(this.model, spec) as expected:
        hooked = generate(this, inputs, 3)
    trace = Trace()
    short = compress(this.model, inputs, spec, trace)
    plain = generate(this, short, 3)
    assert torch.equal(plain.sequences[:, -3:], hooked.sequences[:, -3:])
    assert all(map(torch.equal, plain.logits, hooked.logits))
    assert short["input_ids"].shape[1] < inputs["input_ids"].shape[1]
    assert [(s, i, r.keep.tolist()) for s, i, r in trace.reductions] == [
        (s, i, r.keep.tolist()) for s, i, r in expected.reductions
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_to_reduce_is_the_stock_result(family: str) -> None:
    this, kind = tiny(family), facts(family).kinds[-1]
    inputs = this.inputs([f"a {{{kind}}} or {{{kind}}}?"], **this.media(kind, 2))
    stock = this.model(**inputs).logits
    for spec in (None, "random:1.0"):
        assert torch.equal(this.model(**compress(this.model, inputs, spec)).logits, stock)
