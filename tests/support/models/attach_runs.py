"""Helpers that several tests share: attach runs."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import Tiny, generate

from mmfast.attach import attach

SPEC = "random:0.4+fastv@llm2:0.5"


PROMPTS = ["{video} a", "so what is {video} then?", "{video} short", "a rather long one: {video}!"]


def one(this: Tiny) -> dict[str, Any]:
    return this.inputs(["on {video} what?"], videos=this.videos(1))


def run(this: Tiny, inputs: dict[str, Any], spec: str = SPEC, **kwargs: Any) -> Any:
    with attach(this.model, spec):
        return generate(this, inputs, **kwargs)


def new(out: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return out.sequences[:, inputs["input_ids"].shape[1] :]


def logits_close(a: Any, b: Any, **rows: Any) -> None:
    torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=1e-5, rtol=0)
