"""Stock `generate` in all its ways, with reductions attached."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from attach_runs import PROMPTS, SPEC, logits_close, new, one, run
from tiny_models import FAMILIES, build, generate, tiny
from transformers import DynamicCache, StaticCache

from mmfast.attach import attach


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", [SPEC, "evs?threshold=0.5", "tome:0.3+holitom_inner@llm1:0.5"])
def test_a_ragged_batch_equals_single_rows(family: str, attention: str, spec: str) -> None:
    this = tiny(family, attention)
    videos = this.videos(2) + this.videos(2, seed=7, frames=6 if family != "llava_onevision" else 4)
    _still(videos[1])
    together = run(this, batch := this.inputs(PROMPTS, videos=videos), spec)
    for row, prompt in enumerate(PROMPTS):
        alone = run(this, single := this.inputs([prompt], videos=videos[row : row + 1]), spec)
        assert torch.equal(new(together, batch)[row], new(alone, single)[0])
        a = torch.stack([step[row] for step in together.logits])
        b = torch.stack([step[0] for step in alone.logits])
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def _still(video: Any) -> None:
    """Adaptive methods keep less of a clip in which nothing happens."""
    video[1:] = video[:1]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_static_cache(family: str, batch: int) -> None:
    this = tiny(family)
    inputs = this.inputs(PROMPTS[:batch], videos=this.videos(batch))
    dynamic = run(this, inputs)
    static = run(this, inputs, cache_implementation="static")
    assert torch.equal(static.sequences, dynamic.sequences)
    logits_close(static, dynamic)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [SPEC, "random:0.4", "fastv@llm1:5"])
def test_beams(family: str, spec: str) -> None:
    """A batch with beams equals single rows with beams, and beams without a cache."""
    this = tiny(family)
    videos, beams = this.videos(2), {"num_beams": 3, "tokens": 5}
    inputs = this.inputs(PROMPTS[:2], videos=videos)
    together = new(run(this, inputs, spec, **beams), inputs)
    for row in range(2):
        single = this.inputs(PROMPTS[row : row + 1], videos=videos[row : row + 1])
        assert torch.equal(together[row], new(run(this, single, spec, **beams), single)[0])
    if spec == "random:0.4":  # deeper stages may choose anew at every step without a cache
        bare = run(this, inputs, spec, use_cache=False, **beams)
        assert torch.equal(together, new(bare, inputs))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [7, 16])
@pytest.mark.parametrize("spec", ["random:0.4", "tome:0.3", "evs:0.5+divprune:6"])
def test_chunked_prefill_before_the_llm_equals_one_piece(
    family: str, chunk: int, spec: str
) -> None:
    this = tiny(family)
    inputs = this.inputs(["a {video} b {image} c"], images=this.images(1), videos=this.videos(1))
    whole = run(this, inputs, spec)
    parts = run(this, inputs, spec, prefill_chunk_size=chunk)
    assert torch.equal(parts.sequences, whole.sequences)
    logits_close(parts, whole)


def test_chunked_prefill_token_by_token() -> None:
    this = tiny("qwen3_vl")
    inputs = one(this)
    whole, parts = (run(this, inputs, "tome:0.3", **k) for k in ({}, {"prefill_chunk_size": 1}))
    logits_close(parts, whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_of_a_batch(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(PROMPTS[:3], videos=this.videos(3))
    whole, parts = (run(this, inputs, "tome:0.4", **k) for k in ({}, {"prefill_chunk_size": 9}))
    logits_close(parts, whole)


def test_a_chunk_that_is_padding_in_one_row() -> None:
    """The row without media begins in a later chunk; attention is read in the earlier ones."""
    this = tiny("llava_onevision")
    media = {"videos": this.videos(1)}
    inputs = this.inputs(["{video}?", "only text"], **media)
    chunk = {"prefill_chunk_size": 16}
    together = new(run(this, inputs, "fastv@llm1:0.5", **chunk), inputs)
    for row, single in enumerate([this.inputs(["{video}?"], **media), this.inputs(["only text"])]):
        alone = run(this, single, "fastv@llm1:0.5" if not row else None, **chunk)
        assert torch.equal(together[row], new(alone, single)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_inside_the_llm_keeps_the_budget(family: str) -> None:
    this = tiny(family)
    inputs = one(this)
    for spec, share in ((SPEC, 0.2), ("random@llm1:7", None), ("random:20+random@llm2:9", None)):
        with attach(this.model, spec) as trace:
            generate(this, inputs, prefill_chunk_size=11)
        prompt = oracle.embed(this, inputs)
        last = max(site for site, _, _ in trace.reductions if site != "pre")
        kept = sum(r.m for site, _, r in trace.reductions if site == last)
        n = len(prompt.items[0])
        expected = int(spec.rsplit(":")[-1]) if share is None else round(round(n * 0.4) * 0.5)
        assert kept == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache(family: str) -> None:
    this = tiny(family)
    inputs = this.inputs(PROMPTS[:2], videos=this.videos(2))
    cached = run(this, inputs, "tome:0.4+random@llm2:0.5")
    bare = run(this, inputs, "tome:0.4+random@llm2:0.5", use_cache=False)
    assert torch.equal(bare.sequences, cached.sequences)
    logits_close(bare, cached)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["random:0.4", "random:0.5+random@llm2:0.5"])
def test_prompt_lookup(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = one(this)
    greedy = run(this, inputs, spec, tokens=12)
    looked = run(this, inputs, spec, tokens=12, prompt_lookup_num_tokens=3)
    assert torch.equal(looked.sequences, greedy.sequences)


def test_assistant_model() -> None:
    this = tiny("llava_onevision")
    inputs = one(this)
    helper = build("llava_onevision", seed=3).model
    greedy = run(this, inputs, "random:0.4+random@llm2:0.5", tokens=10)
    helped = run(this, inputs, "random:0.4+random@llm2:0.5", tokens=10, assistant_model=helper)
    assert torch.equal(helped.sequences, greedy.sequences)


@pytest.mark.rest_is_slow(3, 1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["random:0.4", SPEC])
def test_decoding_by_hand_without_positions(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = one(this)
    expected = new(run(this, inputs, spec), inputs)[0]
    given = {k: v for k, v in inputs.items() if k != "attention_mask"}
    tokens, model = [], this.model
    with attach(model, spec):
        out = model(**given, use_cache=True)
        for _ in expected:
            logits = out.logits[:, -1].clone()
            logits[:, this.blocked()] = -torch.inf
            tokens.append(logits.argmax(-1, keepdim=True))
            out = model(input_ids=tokens[-1], past_key_values=out.past_key_values, use_cache=True)
    assert torch.cat(tokens, 1)[0].tolist() == expected.tolist()


@pytest.mark.rest_is_slow(3, 2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["random:0.4", SPEC])
def test_given_embeddings_of_the_prompt(family: str, spec: str) -> None:
    """`inputs_embeds` with placeholder embeddings takes the same way as ids."""
    this = tiny(family)
    inputs = one(this)
    with attach(this.model, spec):
        expected = this.model(**inputs).logits
        positions = oracle.positions_of(this, inputs)
        positions = positions[None] if positions.ndim == 1 else positions[:, None]
        given = {k: v for k, v in inputs.items() if k not in ("input_ids", "mm_token_type_ids")}
        embeds = this.model.get_input_embeddings()(inputs["input_ids"])
        out = this.model(inputs_embeds=embeds, position_ids=positions, **given).logits
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", ["random:0.4", SPEC])
def test_features_encoded_before_attach(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = this.inputs(["{image} {video}?"], images=this.images(1), videos=this.videos(1))
    expected = run(this, inputs, spec)
    outputs = {kind: oracle.encode(this, inputs, kind) for kind in ("image", "video")}
    pixels = set(oracle.PIXELS.values())
    given = {k: v for k, v in inputs.items() if k not in pixels}
    again = run(this, given, spec, mm_encoder_outputs=outputs)
    assert torch.equal(again.sequences, expected.sequences)
    logits_close(again, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_own_caches(family: str) -> None:
    this = tiny(family)
    inputs, config = one(this), this.model.config
    expected = run(this, inputs)
    for cache in (DynamicCache(), DynamicCache(config=config), StaticCache(config, 400)):
        assert torch.equal(run(this, inputs, past_key_values=cache).sequences, expected.sequences)
        length = inputs["input_ids"].shape[1] + 7
        assert int(cache.get_seq_length()) == length
        assert all(int(layer.get_seq_length()) == length for layer in cache.layers)
