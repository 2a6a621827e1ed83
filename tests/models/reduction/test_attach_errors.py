"""What a user can get wrong, and what the trace says when nothing is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, build, generate, tiny
from transformers import DynamicCache, EncoderDecoderCache

from mmfast.attach import attach
from mmfast.core.errors import MmfastError, ModelError, SpecError
from mmfast.models.cache_name import CACHE


def ask(family: str = "llava_onevision") -> Any:
    this = tiny(family)
    return this, this.inputs(["on {video} what?"], videos=this.videos(1))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fastv@llm4:0.5", "4 layers; choose llm0 to llm3"),
        ("divprun:0.5", "did you mean 'divprune'"),
        ("random@kv:0.5", "cannot run at site 'kv'"),
        ("random:0", "keeps nothing"),
        ("random:1.5", "no share"),
        ("random", "needs a budget"),
    ],
)
def test_wrong_specs_are_refused_before_anything_is_hooked(spec: str, message: str) -> None:
    this, _ = ask()
    with pytest.raises(SpecError, match=message) as error, attach(this.model, spec):
        pass
    assert "\n" not in str(error.value)
    assert not any(layer._forward_pre_hooks for layer in this.model.get_decoder().layers)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("snapk:64", "did you mean 'snapkv'"),
        ("snapkv", "needs a budget"),
        ("snapkv@llm2:64", "cannot run at site 'llm2'"),
        ("snapkv:64+keynorm:0.5", "keep one"),
        ("quant:3", "8, 4 or 2 bits"),
        ("snapkv:64?windows=3", "did you mean 'window'"),
    ],
)
def test_wrong_cache_specs_are_refused_before_anything_is_hooked(spec: str, message: str) -> None:
    this, _ = ask()
    with pytest.raises(SpecError, match=message) as error, attach(this.model, cache=spec):
        pass
    assert "\n" not in str(error.value)
    assert not any(layer._forward_hooks for layer in this.model.get_decoder().layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_places_are_refused_where_tokens_go(family: str) -> None:
    this, inputs = ask(family)
    places = torch.tensor([3, inputs["input_ids"].shape[1] - 1])
    with torch.no_grad():
        stock = this.model(**inputs, logits_to_keep=places).logits
        with attach(this.model, "random:1.0"):
            assert torch.equal(this.model(**inputs, logits_to_keep=places).logits, stock)
        with attach(this.model, "random:0.5"):
            whole = this.model(**inputs).logits
            few = this.model(**inputs, logits_to_keep=2).logits
            torch.testing.assert_close(few, whole[:, -2:], atol=1e-5, rtol=1e-5)
            with pytest.raises(ModelError, match="logits_to_keep as places") as error:
                this.model(**inputs, logits_to_keep=places)
        assert "\n" not in str(error.value)
        assert torch.equal(this.model(**inputs, logits_to_keep=places).logits, stock)


@pytest.mark.parametrize("spec", ["random:9999", "random:0.5+random:30", "random@llm2:400"])
def test_a_budget_above_the_tokens_there_are(spec: str) -> None:
    this, inputs = ask()
    with attach(this.model, spec), pytest.raises(SpecError, match="more than the"):
        generate(this, inputs)
    with attach(this.model, "random:0.5"):  # and the model is fine afterwards
        generate(this, inputs, 2)


def test_a_signal_that_is_not_there_is_named() -> None:
    this, inputs = ask()
    with attach(this.model, "fastv@llm0:0.5"), pytest.raises(ModelError, match=r"'attn'.*K must"):
        generate(this, inputs)
    tiles = this.inputs(["{image}"], images=this.images(1, size=(60, 60)))
    image = {k: v for k, v in tiles.items() if k != "pixel_values"}
    image["mm_encoder_outputs"] = {
        "image": this.model.model.get_image_features(
            tiles["pixel_values"], tiles["image_sizes"], return_dict=True
        )
    }
    with attach(this.model, "visionzip:0.5"), pytest.raises(MmfastError, match="inside attach"):
        generate(this, image)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_tells_what_happened(family: str) -> None:
    this, inputs = ask(family)
    with attach(this.model, "evs:0.5+divprune:0.5+fastv@llm2:0.5+random@llm3:2") as trace:
        generate(this, inputs, 3)
    sites = [row.stage for row in trace.rows]
    assert sites == ["pre", "pre", "llm2", "llm3"]
    assert [site for site, _, _ in trace.reductions] == ["pre", "pre", "llm2", "llm3"]
    n = trace.rows[0].tokens_in
    half = round(n * 0.5)
    quarter = round(half * 0.5)
    assert [row.tokens_out for row in trace.rows] == [half, quarter, round(quarter * 0.5), 2]
    assert [row.method for row in trace.rows] == ["evs", "divprune", "fastv", "random"]
    assert [(r.n, r.m) for _, _, r in trace.reductions][:2] == [(n, half), (half, quarter)]
    assert all(row.ms >= 0 for row in trace.rows)


@pytest.mark.parametrize("family", FAMILIES)
def test_inside_the_vision_tower(family: str) -> None:
    this, inputs = ask(family)
    with torch.no_grad():
        stock = this.model(**inputs).logits
        with attach(this.model, "tome@vit:1.0"):
            assert torch.equal(this.model(**inputs).logits, stock)
        with attach(this.model, "tome@vit:0.5+random:0.5+fastv@llm2:0.5") as trace:
            generate(this, inputs, 2)
        assert torch.equal(this.model(**inputs).logits, stock)
    assert {row.stage for row in trace.rows} == {"vit", "pre", "llm2"}


def test_half_precision_runs() -> None:
    this = build("qwen3_vl")
    this.model.to(torch.bfloat16)
    inputs = this.inputs(["on {video} what?"], videos=this.videos(1))
    with attach(this.model, "tome:0.5+holitom_inner@llm2:0.5"):
        out = generate(this, inputs, 3)
    assert all(bool(torch.isfinite(logits).all()) for logits in out.logits)


def test_what_holds_a_model_and_what_is_none_say_so() -> None:
    holder = torch.nn.Module()
    holder.vlm = tiny("llava_onevision").model
    with pytest.raises(ModelError, match=r"holds a LlavaOnevision\w+ as \.vlm; attach to that$"):
        attach(holder, "random:0.5")
    with pytest.raises(ModelError, match="which is no model; give a loaded one"):
        attach(type(holder.vlm), "random:0.5")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_model_can_be_attached(family: str) -> None:
    this, inputs = ask(family)
    base = this.model.model
    with torch.no_grad():
        with attach(this.model, "random:0.5+fastv@llm2:0.5"):
            whole = this.model(**inputs).logits
        with attach(base, "random:0.5+fastv@llm2:0.5"):
            hidden = base(**inputs).last_hidden_state
        assert torch.equal(this.model.lm_head(hidden), whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_is_not_a_share_of_one(family: str) -> None:
    """The number 1 asks the tower for its signals, unlike the share 1.0."""
    this, inputs = ask(family)
    for spec in ("fastv@pre:1", "visionzip:1"):
        with attach(this.model, spec) as trace:
            generate(this, inputs, 1)
        assert {r.m for _, _, r in trace.reductions} == {1}
    refused = pytest.raises(SpecError, match=r"budget 1 .*frames")
    with torch.no_grad(), refused, attach(this.model, "tome@vit:1"):
        this.model(**inputs)


@pytest.mark.parametrize("kind", ["EncoderDecoderCache", "tuple"])
def test_a_cache_without_layers_is_named(kind: str) -> None:
    this, inputs = ask()
    pair = (DynamicCache(), DynamicCache())
    cache = pair if kind == "tuple" else EncoderDecoderCache(*pair)
    with (
        pytest.raises(ModelError, match=rf"is of type {kind}.*pass DynamicCache") as error,
        attach(this.model, cache="snapkv:8"),
    ):
        generate(this, inputs, **{CACHE: cache})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wrong", [5, ["self:0.1"], {"self": 0.1}, True])
@pytest.mark.parametrize("name", ["decode", "attn"])
def test_what_is_no_spec_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(MmfastError, match=name) as error:
        attach(tiny("llava").model, **{name: wrong})
    assert repr(wrong) in str(error.value) and "\n" not in str(error.value)
