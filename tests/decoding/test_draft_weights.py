"""Drafts on weights in fewer bits: what is said is what the model says, without rounding."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from text_zoo import prompt, text_model
from tiny_models import Tiny, generate, tiny
from torch.nn import functional as F

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.core.spec import WEIGHTS
from mmfast.decoding.speculation import plan_decode
from mmfast.models import packing
from mmfast.models.decoder import grouped
from mmfast.models.decoder.draft_stage import DraftSource
from mmfast.models.decoder.draft_weights import DraftWeights
from mmfast.models.decoder.drafters import ModelDrafter
from mmfast.models.packing import PackedLinear, pack_weights
from mmfast.ops.weight_forms import FORMS, Int4Weights, Int8Weights, pack
from mmfast.planner.cost import draft_shape

FIXED = "adapt=0&least=0&most=3"
WHOLE, PART = f"self?weights=int4&{FIXED}", f"self:0.3?weights=int4&{FIXED}"
SHORT = f"self?weights=int8&{FIXED}&reduce=divprune:0.3"
VARIED = {"repetition_penalty": 1.3}  # tiny models repeat themselves, and drafts would all stand


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers of tiny models be packed, which are not worth it."""
    monkeypatch.setattr(packing, "SMALL", 64)


def asked(this: Tiny, rows: int = 1) -> dict[str, Any]:
    texts = ["on {image} what?", "so what is {image} then?"][:rows]
    return this.inputs(texts, **this.media("image", rows, 0))


def counts(trace: Any) -> tuple[int, int]:
    rows = [row for row in trace.rows if row.stage == "draft"]
    return sum(row.tokens_in for row in rows), sum(row.tokens_out for row in rows)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl", "gemma3"])
def test_tokens_and_logits_are_those_of_the_model(family: str, rows: int) -> None:
    this = tiny(family)
    inputs = asked(this, rows)
    want = generate(this, inputs, 12, **VARIED)
    for spec in (WHOLE, PART, SHORT):
        with attach(this.model, decode=spec) as trace:
            found = generate(this, inputs, 12, **VARIED)
        assert torch.equal(found.sequences, want.sequences), spec
        both = torch.stack(found.logits), torch.stack(want.logits)
        torch.testing.assert_close(*both, atol=1e-4, rtol=0)  # int8 is 1e-2 away
        assert counts(trace)[0] > 0, spec
        assert any("int4" in note or "int8" in note for note in trace.notes), spec
    assert not [m for m in this.model.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "opt"])
def test_text_models_draft_on_their_whole_cache(name: str) -> None:
    model, ids = text_model(name), prompt(20)
    given = {"max_new_tokens": 12, "do_sample": False, **VARIED}
    want = model.generate(ids, **given)
    with attach(model, decode=WHOLE) as trace:
        assert torch.equal(model.generate(ids, **given), want)
    assert counts(trace)[0] > 0


def test_drafts_are_rounded_and_verified_by_weights_that_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the packed weights say nothing, drafts fall and the answer stays."""
    this = tiny("llava_onevision")
    inputs = asked(this)
    want = generate(this, inputs, 12, **VARIED).sequences
    with attach(this.model, decode=WHOLE) as trace:
        generate(this, inputs, 12, **VARIED)
    right = counts(trace)[1]

    source = DraftSource(this.model, plan_decode(WHOLE))  # type: ignore[arg-type]
    for form in (Int4Weights, Int8Weights):
        stock = form.product
        monkeypatch.setattr(form, "product", lambda self, x, *bias, run=stock: -run(self, x, *bias))
    with attach(this.model, decode=source) as trace:
        assert torch.equal(generate(this, inputs, 12, **VARIED).sequences, want)
    assert counts(trace)[1] == 0 < right


def test_another_thread_reads_the_weights_of_the_model() -> None:
    model, ids, found = text_model("llama"), prompt(4), list[torch.Tensor]()
    weights = DraftWeights(model, "int4")

    def read() -> None:
        with torch.no_grad():
            found.append(model(ids).logits)

    read()
    with weights.installed(), weights.drafting():
        read()
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    read()
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) and torch.equal(found[0], found[3])


def test_drafts_read_shared_keys_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, stock = (
        text_model("llama"),
        list[tuple[int, ...]](),
        F.scaled_dot_product_attention,
    )

    def watched(query: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        seen.append(tuple(query.shape[1:3]))
        return stock(query, *args, **more)

    monkeypatch.setattr(grouped.F, "scaled_dot_product_attention", watched)
    with attach(model, decode=WHOLE):
        model.generate(prompt(20), max_new_tokens=6, do_sample=False)
    groups = model.config.num_attention_heads // model.config.num_key_value_heads
    assert groups > 1 and (model.config.num_key_value_heads, groups) in seen


def test_many_tokens_at_once_are_read_as_the_model_reads_them() -> None:
    model, weights = text_model("llama"), DraftWeights(text_model("llama"), "int4")
    with torch.no_grad(), weights.installed():
        want = model(prompt(40)).logits
        with weights.drafting():
            assert torch.equal(model(prompt(40)).logits, want)


def test_a_model_that_is_packed_drafts_on_fewer_bits_still() -> None:
    model, ids = copy.deepcopy(text_model("llama")), prompt(20)
    pack_weights(model, "int8")
    want = model.generate(ids, max_new_tokens=10, do_sample=False)
    with attach(model, decode=WHOLE) as trace:
        assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False), want)
    assert counts(trace)[0] > 0


def test_a_model_of_its_own_is_packed_for_itself(tmp_path: Any) -> None:
    model, ids = text_model("llama"), prompt(20)
    model.save_pretrained(tmp_path)
    want = model.generate(ids, max_new_tokens=10, do_sample=False)
    source = DraftSource(model, plan_decode(f"draft:{tmp_path}?weights=int8&{FIXED}"))  # type: ignore[arg-type]
    assert any(isinstance(each, PackedLinear) for each in source.draft.modules())
    assert not any(isinstance(each, PackedLinear) for each in model.modules())
    with attach(model, decode=source) as trace:
        assert torch.equal(model.generate(ids, max_new_tokens=10, do_sample=False), want)
    proposed, accepted = counts(trace)
    assert accepted > proposed / 2
    shape = draft_shape(source, model)
    assert shape is not None and shape.shape.weights > 0


def test_memory_of_both_is_counted() -> None:
    this = tiny("llava_onevision")
    source = DraftSource(this.model, plan_decode(PART))  # type: ignore[arg-type]
    layers = [m for m in this.model.get_decoder().modules() if type(m) is torch.nn.Linear]
    least = sum(pack("int4", m.weight).nbytes for m in layers)
    shape = draft_shape(source, this.model)
    assert shape is not None and shape.shape.weights == source.light_bytes >= least > 0


def test_the_names_are_those_of_the_forms() -> None:
    assert set(WEIGHTS) == set(FORMS)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("self?weights=int5", "unknown weights of decode 'self' 'int5'; did you mean"),
        ("self?weights=", "unknown weights"),
        ("self:0.1?weights=fastest", "unknown weights"),
        ("draft:here?weights=int4&learn=1e-4", "learns on float weights"),
        ("self?weights=int4&score=snapkv", "chooses nothing by score="),
        ("self?weights=int4&rise=0.8", "no share that could rise"),
        ("recycle?weights=int4", "unknown knob"),
        ("self", "weights of the draft"),
    ],
)
def test_specs_that_are_none(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words) as found:
        plan_decode(spec)
    assert "\n" not in str(found.value)


def test_models_that_cannot_are_refused() -> None:
    model = copy.deepcopy(text_model("llama")).to("meta")
    with pytest.raises(ModelError, match="is on meta"):
        attach(model, decode=WHOLE)
    compiled = copy.deepcopy(text_model("llama"))
    compiled.forward = torch.compile(compiled.forward, backend="eager")
    with pytest.raises(ModelError, match="compiled code of LlamaForCausalLM"):
        attach(compiled, decode=WHOLE)
    with pytest.raises(SpecError, match=r"only behind a prompt|from pass to pass"):
        attach(text_model("llama"), decode=WHOLE, cache="sink:4+window:16")


def test_a_pipeline_drafts_on_fewer_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache grows in place, where drafts write behind what the model has verified."""
    clip = str(mmfast.__path__[0]) + "/../assets/clips/red-circle.mp4"
    question, drafts = "Describe the clip.", list[int]()
    stock = mmfast.pipeline("video-qa", device="cpu", max_new_tokens=40)
    pair = (stock.model, stock.processor)
    want = stock(clip, question).text
    propose = ModelDrafter.propose

    def seen(self: Any, *args: Any) -> Any:
        run = propose(self, *args)
        drafts.append(len(run.tokens[0]))
        return run

    monkeypatch.setattr(ModelDrafter, "propose", seen)
    for spec in (WHOLE, PART):
        pipe = mmfast.pipeline("video-qa", pair, decode=spec, max_new_tokens=40)
        found = pipe(clip, question)
        assert found.text == want and sum(drafts) > 8
        proposed, accepted = counts(found.trace)
        assert accepted > 0.8 * proposed
        drafts.clear()
