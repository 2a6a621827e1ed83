"""Corners: several media and beams, text rows in a visual batch, copied caches, compiled decode."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from attach_runs import PROMPTS, SPEC, logits_close, new, one, run
from tiny_models import FAMILIES, build, generate, tiny
from transformers import CompileConfig, cache_utils

from mmfast.attach import attach
from mmfast.models.reduction import cache_layers


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [None, 13])
def test_several_media_per_row_with_beams(family: str, chunk: int | None) -> None:
    this = tiny(family)
    images = [*this.images(2), *this.images(2, 5, (30, 44))]
    videos, options = this.videos(2), {"num_beams": 2, "tokens": 4}
    prompts = ["{image} a {video} {image}?", "on {image} {image} and {video}"]
    inputs = this.inputs(prompts, images=images, videos=videos)
    options |= {"prefill_chunk_size": chunk} if chunk else {}
    spec = "tome:0.4" if chunk else "tome:0.4+fastv@llm2:0.5"
    together = new(run(this, inputs, spec, **options), inputs)
    for row, prompt in enumerate(prompts):
        media = {"images": images[2 * row : 2 * row + 2], "videos": videos[row : row + 1]}
        single = this.inputs([prompt], **media)
        assert torch.equal(together[row], new(run(this, single, spec, **options), single)[0])


@pytest.mark.rest_is_slow(3)
@pytest.mark.filterwarnings("ignore:.*reduced nothing")  # a row without media, on purpose
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_without_media_in_a_visual_batch(family: str, attention: str) -> None:
    this = tiny(family, attention)
    inputs = this.inputs(["{video}?", "only text here"], videos=this.videos(1))
    together = new(run(this, inputs), inputs)
    visual = this.inputs(["{video}?"], videos=this.videos(1))
    text = this.inputs(["only text here"])
    assert torch.equal(together[0], new(run(this, visual), visual)[0])
    assert torch.equal(together[1], new(run(this, text), text)[0])


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["random:0.4", SPEC])
def test_a_copied_cache_branches(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = one(this)
    with attach(this.model, spec):
        first = generate(this, inputs, 2)
        branch = copy.deepcopy(first.past_key_values)
        given = {"input_ids": first.sequences}
        a = generate(this, given, 4, past_key_values=first.past_key_values)
        b = generate(this, given, 4, past_key_values=branch)
    assert torch.equal(a.sequences, b.sequences)
    logits_close(a, b)


@pytest.mark.parametrize("family", ["llava_onevision", "lfm2_vl"])
@pytest.mark.parametrize(
    ("spec", "cache"),
    [
        (SPEC, None),
        ("random:0.4", "snapkv:0.5"),
        (None, "quest:0.5?skip=0"),
        ("random:0.4", "quant:8"),
    ],
)
def test_a_saved_cache_goes_on(
    family: str, spec: str | None, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, file = tiny(family), io.BytesIO()
    inputs = this.inputs(["what is {image} this?"], images=this.images(1))
    with attach(this.model, spec, cache=cache):
        first = generate(this, inputs, 2)
        torch.save(first.past_key_values, file)
        monkeypatch.setattr(cache_layers, "_CLASSES", {})  # as in the next process
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        given = {"input_ids": first.sequences}
        a = generate(this, given, 4, past_key_values=first.past_key_values)
        b = generate(this, given, 4, past_key_values=saved)
    assert torch.equal(a.sequences, b.sequences)
    logits_close(a, b)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_after_leaving(family: str) -> None:
    """A cache reduced before the LLM needs no hook any more."""
    this = tiny(family)
    inputs = one(this)
    with attach(this.model, "random:0.4"):
        whole = generate(this, inputs, 8)
        first = generate(this, inputs, 4)
    given = {"input_ids": first.sequences}
    rest = generate(this, given, 4, past_key_values=first.past_key_values)
    assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_attach_continues_an_old_cache(family: str) -> None:
    this = tiny(family, "eager")
    inputs = one(this)
    with attach(this.model, SPEC):
        whole = generate(this, inputs, 8)
        first = generate(this, inputs, 4)
    with attach(this.model, "tome:0.5+random@llm1:0.5"):
        given = {"input_ids": first.sequences}
        rest = generate(this, given, 4, past_key_values=first.past_key_values)
    assert torch.equal(rest.sequences, whole.sequences)


@pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="there is no such cache")
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_cache(family: str) -> None:
    this = tiny(family)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    out = run(this, one(this), "random:0.4", tokens=4, **options)
    exact = run(this, one(this), "random:0.4", tokens=4)
    assert torch.stack(out.logits).shape == torch.stack(exact.logits).shape
    torch.testing.assert_close(out.logits[0], exact.logits[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_several_answers(family: str) -> None:
    this = tiny(family)
    options = {"do_sample": True, "num_return_sequences": 3, "tokens": 5}
    answers = []
    for cache in (True, False):
        torch.manual_seed(5)
        answers.append(run(this, one(this), "random:0.4", use_cache=cache, **options).sequences)
    assert len(answers[0]) == 3
    assert torch.equal(*answers)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 2])
def test_compiled_decode_is_one_graph(family: str, batch: int) -> None:
    from torch._dynamo.utils import counters

    this = build(family)
    inputs = this.inputs(PROMPTS[:batch], videos=this.videos(batch))
    config = CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    eager = run(this, inputs)
    compiled = run(this, inputs, cache_implementation="static", compile_config=config)
    assert torch.equal(compiled.sequences, eager.sequences)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow
def test_a_compiled_prefill_is_reduced_too() -> None:
    this = build("llava_onevision")
    inputs = one(this)
    torch._dynamo.reset()
    with attach(this.model, SPEC):
        expected = this.model(**inputs).logits
        assert torch.equal(torch.compile(this.model, backend="eager")(**inputs).logits, expected)
