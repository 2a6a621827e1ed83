"""Reduced inputs give what `attach` gives, in every family."""

from __future__ import annotations

import pytest
import torch
from compress_checks import equal_to_attach
from tiny_models import FAMILIES, facts, generate, tiny

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction.inputs import compress

SOME = ("llava", "llava_next", "internvl", "fast_vlm")
OTHERS = ("qwen2_vl", "qwen2_5_omni_thinker", "idefics3", "smolvlm")
SPECS = ["random:0.3", "tome:0.3", "visionzip:0.5+divprune:0.5"]
CASES = [
    (family, kind, batch, spec)
    for families, batches, specs in (
        (SOME, (1, 3), SPECS),
        (FAMILIES, (1, 3), SPECS),
        (OTHERS, (3,), SPECS[1:]),
    )
    for family in families
    for kind in facts(family).kinds
    for batch in batches
    for spec in specs
]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize(("family", "kind", "batch", "spec"), CASES)
def test_compressed_inputs_equal_attach(family: str, kind: str, batch: int, spec: str) -> None:
    if family == "fast_vlm":
        spec = spec.replace("visionzip", "random")
    this = tiny(family)
    texts = ["a {}?", "{} and what else?", "{}{}."][:batch]
    texts = [text.replace("{}", f"{{{kind}}}") for text in texts]
    inputs = this.inputs(texts, **this.media(kind, sum(text.count("{") for text in texts)))
    equal_to_attach(this, inputs, spec)


@pytest.mark.parametrize("family", OTHERS)
def test_forward_with_nothing_to_reduce_is_the_stock_result(family: str) -> None:
    this, kind = tiny(family), facts(family).kinds[-1]
    inputs = this.inputs([f"a {{{kind}}} or {{{kind}}}?"], **this.media(kind, 2))
    stock = this.model(**inputs).logits
    for spec in (None, "random:1.0"):
        assert torch.equal(this.model(**compress(this.model, inputs, spec)).logits, stock)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", [*SOME, *FAMILIES])
@pytest.mark.parametrize("spec", [None, "random:1.0"])
def test_nothing_to_reduce_is_the_stock_result(family: str, spec: str | None) -> None:
    this = tiny(family)
    inputs = this.inputs(["a {image}?", "{image}."], images=this.images(2))
    stock = generate(this, inputs, 4)
    plain = generate(this, compress(this.model, inputs, spec), 4)
    assert torch.equal(plain.sequences, stock.sequences)
    assert all(map(torch.equal, plain.logits, stock.logits))


def test_internvl_mixes_images_and_clips_in_one_prompt() -> None:
    this = tiny("internvl")
    media = {"images": this.images(2), "videos": this.videos(1)}
    inputs = this.inputs(["{image} {video} {image}?"], **media)
    with attach(this.model, "tome:0.4") as trace:
        expected = this.model(**inputs).logits
    assert [r.n for _, _, r in trace.reductions].count(4 * 9) == 1  # the clip is one item
    assert torch.equal(this.model(**compress(this.model, inputs, "tome:0.4")).logits, expected)


def test_a_prompt_that_ends_with_an_image_needs_its_last_token() -> None:
    this = tiny("llava")
    inputs = this.inputs(["what is {image}"], images=this.images(1))
    with pytest.raises(ModelError, match=r"put text behind it, or use attach\(\)"):
        compress(this.model, inputs, "evs:1")


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_media_and_a_bare_forward(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image} {video} {image}?"], images=this.images(2), videos=this.videos(1))
    with attach(this.model, "tome:0.4"):
        expected = this.model(**inputs).logits
    assert torch.equal(this.model(**compress(this.model, inputs, "tome:0.4")).logits, expected)


def test_wrong_sites_and_inputs_are_refused() -> None:
    this = tiny("llava_onevision")
    inputs = this.inputs(["a {video}?"], videos=this.videos(1))
    with pytest.raises(SpecError, match="attach"):
        compress(this.model, inputs, "fastv@llm2:0.5")
    with pytest.raises(ModelError, match="input_ids"):
        compress(this.model, {}, "random:0.5")
