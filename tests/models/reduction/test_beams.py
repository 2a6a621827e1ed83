"""Beams of a prompt have its media in their order, or the call is refused."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import Tiny, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.models.families.adapter import adapter_for
from mmfast.models.reduction import beams

EXPAND = "_expand_inputs_for_generation"


def repeated(this: Tiny, inputs: dict[str, Any]) -> torch.Tensor:
    """Pixels of three beams of each prompt, as `generate` of transformers 5.17 asks for them."""
    return getattr(this.model, EXPAND)(expand_size=3, **inputs)[1]["pixel_values"]


@pytest.mark.parametrize(
    ("family", "counts", "stock"),
    [
        ("llava", [1, 0], True),
        ("llava", [2, 0], False),
        ("llava_next", [2, 1], False),
        ("fast_vlm", [1, 3], False),
        ("idefics3", [2, 0], True),  # pixels of a prompt are a row of their own, padded
        ("idefics3", [1, 2], True),
    ],
)
def test_pictures_are_repeated_with_their_prompt(
    family: str, counts: list[int], stock: bool
) -> None:
    this = tiny(family)
    texts = ["{image}" * count + "what?" for count in counts]
    images, cut = this.images(sum(counts)), counts[0]
    inputs = this.inputs(texts, images=images)
    whole = [text for text in texts for _ in range(3)]
    expected = this.inputs(whole, images=images[:cut] * 3 + images[cut:] * 3)["pixel_values"]
    assert torch.equal(repeated(this, inputs), expected) == stock
    with beams.media_of_beams(this.model, adapter_for(this.model)):
        assert torch.equal(repeated(this, inputs), expected)
        _, whole = getattr(this.model, EXPAND)(expand_size=1, **inputs)
        assert whole["pixel_values"] is inputs["pixel_values"]
    assert EXPAND not in this.model.__dict__


@pytest.mark.parametrize(("family", "counts"), [("internvl", [1]), ("internvl", [1, 0])])
def test_tiles_of_pictures_are_refused(family: str, counts: list[int]) -> None:
    this = tiny(family)
    texts = ["{image}" * count + "what?" for count in counts]
    inputs = this.inputs(texts, images=this.images(sum(counts)))
    assert len(inputs["pixel_values"]) > 1
    refused = pytest.raises(ModelError, match=r"^3 beams .*wrong pixel_values.* 5\.18 or later$")
    with beams.media_of_beams(this.model, adapter_for(this.model)), refused:
        repeated(this, inputs)


@pytest.mark.parametrize("several", [{"num_beams": 2}, {"do_sample": True}])
def test_beams_hear_all_sounds_of_their_prompt(several: dict[str, Any]) -> None:
    """Stock code gives one beam the first sound twice, and the other one the second."""
    this = tiny("qwen2_5_omni_thinker")
    inputs = this.inputs(["{audio} or {audio}?", "{audio}"], **this.media("audio", 3))
    how = {"tokens": 2, "num_return_sequences": 2, **several}
    logits = []
    for reduce in (None, "random:1.0", "random:0.5"):
        with attach(this.model, reduce) if reduce else nullcontext():
            first, alone = generate(this, inputs, **how), generate(this, inputs, tokens=1)
        logits.append((first.logits[0][::2], alone.logits[0]))
    (stock, right), *ours = logits
    assert not torch.allclose(stock[0], right[0], atol=1e-4)
    assert torch.equal(ours[0][1], right)
    for first, alone in ours:
        torch.testing.assert_close(first, alone, atol=1e-5, rtol=0)
