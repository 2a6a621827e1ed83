"""What reduced inputs promise, for the tests of every family."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import Tiny, generate

from mmfast.attach import attach
from mmfast.core.trace import Trace
from mmfast.models.reduction.inputs import compress


def equal_to_attach(this: Tiny, inputs: dict[str, Any], spec: str, within: float = 0.0) -> None:
    """Tokens, logits and decisions of reduced inputs are those of hooks."""
    with attach(this.model, spec) as expected:
        hooked = generate(this, inputs, 6)
    trace = Trace()
    short = compress(this.model, inputs, spec, trace)
    plain = generate(this, short, 6)
    assert torch.equal(plain.sequences[:, -6:], hooked.sequences[:, -6:])
    for mine, theirs in zip(plain.logits, hooked.logits, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=within)
    assert short["input_ids"].shape[1] < inputs["input_ids"].shape[1]
    assert [(s, i, r.keep.tolist()) for s, i, r in trace.reductions] == [
        (s, i, r.keep.tolist()) for s, i, r in expected.reductions
    ]
