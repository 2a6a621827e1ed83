"""Reduced inputs give what `attach` gives, without a hook."""

from __future__ import annotations

import pytest
import torch
from compress_checks import equal_to_attach
from tiny_models import FAMILIES, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction.inputs import compress


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("spec", ["random:0.3", "tome:0.3", "visionzip:0.5+divprune:0.5"])
def test_compressed_inputs_equal_attach(family: str, batch: int, spec: str) -> None:
    this = tiny(family)
    prompts = ["a {video}?", "{video} and what else?", "{video}"][:batch]
    inputs = this.inputs(prompts, videos=this.videos(batch))
    equal_to_attach(this, inputs, spec)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_media_and_a_bare_forward(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image} {video} {image}?"], images=this.images(2), videos=this.videos(1))
    with attach(this.model, "tome:0.4"):
        expected = this.model(**inputs).logits
    assert torch.equal(this.model(**compress(this.model, inputs, "tome:0.4")).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [None, "random:1.0"])
def test_nothing_to_reduce_is_the_stock_result(family: str, spec: str | None) -> None:
    this = tiny(family)
    inputs = this.inputs(["a {video}?", "{video}"], videos=this.videos(2))
    stock = generate(this, inputs, 4)
    plain = generate(this, compress(this.model, inputs, spec), 4)
    assert torch.equal(plain.sequences, stock.sequences)
    assert all(map(torch.equal, plain.logits, stock.logits))


def test_wrong_sites_and_inputs_are_refused() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["a {video}?"], videos=this.videos(1))
    with pytest.raises(SpecError, match="attach"):
        compress(this.model, inputs, "fastv@llm2:0.5")
    with pytest.raises(ModelError, match="input_ids"):
        compress(this.model, {}, "random:0.5")
