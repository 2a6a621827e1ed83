"""Helpers that several tests share: cache runs."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import FAMILIES, Tiny, generate

from mmfast.attach import attach

PROMPTS = ["{m} a", "so what is {m} then?", "{m} short", "a rather long one: {m}!"]


MORE = (*FAMILIES, "gemma3", "lfm2_vl")  # sliding windows, and convolutions


def kind_of(this: Tiny) -> str:
    return "video" if "video" in this.facts.kinds else "image"


def rows(this: Tiny, numbers: list[int]) -> dict[str, Any]:
    """A left-padded batch of some of `PROMPTS`."""
    kind = kind_of(this)
    media = this.media(kind, len(PROMPTS))
    media = {name: [items[i] for i in numbers] for name, items in media.items()}
    return this.inputs([PROMPTS[i].replace("{m}", f"{{{kind}}}") for i in numbers], **media)


def run(this: Tiny, inputs: dict[str, Any], spec: str | None, **kwargs: Any) -> Any:
    with attach(this.model, cache=spec):
        return generate(this, inputs, **kwargs)


def new(out: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return out.sequences[:, inputs["input_ids"].shape[1] :]


def close(a: Any, b: Any, row: int | None = None) -> None:
    """Equal up to rounding: the stock LFM2 is off by 1e-5 between a batch and single rows."""
    first = torch.stack(list(a.logits))
    first = first if row is None else first[:, row : row + 1]
    torch.testing.assert_close(first, torch.stack(list(b.logits)), atol=2e-5, rtol=0)
