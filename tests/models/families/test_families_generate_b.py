"""Beams and static caches in Qwen2-VL, the Omni thinker, Idefics3 and SmolVLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import generate, tiny

from mmfast.attach import attach

OMNI = "qwen2_5_omni_thinker"
# Sound is encoded inside the forward pass, so beams repeat it there; rows of SmolVLM's pixels are
# clips, not prompts.
CASES = [(OMNI, "audio"), ("qwen2_vl", "image"), ("idefics3", "image"), ("smolvlm", "video")]
SPEC = "divprune:0.4+fastv@llm2:0.5"


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.parametrize(
    "options", [{"num_beams": 2, "num_return_sequences": 2}, {"cache_implementation": "static"}]
)
def test_a_batch_equals_its_rows(family: str, kind: str, options: dict[str, Any]) -> None:
    this = tiny(family)
    texts = [f"on {{{kind}}} what?", f"{{{kind}}}{{{kind}}} and?"]
    media = this.media(kind, 3)
    ((name, items),) = media.items()
    batch = this.inputs(texts, **media)
    with attach(this.model, SPEC):
        together = generate(this, batch, 3, **options)
    count = options.get("num_return_sequences", 1)
    for row, (text, part) in enumerate(zip(texts, (items[:1], items[1:]), strict=True)):
        inputs = this.inputs([text], **{name: part})
        with attach(this.model, SPEC) as trace:
            alone = generate(this, inputs, 3, **options)
        assert trace.reductions
        mine = together.sequences[row * count : (row + 1) * count, batch["input_ids"].shape[1] :]
        assert torch.equal(mine, alone.sequences[:, inputs["input_ids"].shape[1] :])
