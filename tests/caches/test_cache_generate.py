"""Stock `generate` in all its ways, with a cache that loses entries."""

from __future__ import annotations

from typing import Any

import cache_oracle
import decode_models
import model_oracle as oracle
import pytest
import torch
from cache_runs import MORE, close, new, rows, run
from gate_models import give_gates
from tiny_models import ALL_FAMILIES, FAMILIES, generate, tiny
from transformers import DynamicCache, StaticCache, cache_utils

from mmfast.attach import attach
from mmfast.core.errors import ModelError

WHOLE = (
    "sink:1.0",
    "snapkv:1.0",
    "snapkv:4000",
    "lookm:4000",
    "finch:1.0",
    "compactor:1.0",
    "kvzip:1.0",
    "kvsquared:1.0",
    "kvcompose:1.0",
    "fastkvzip:1.0",
    "keynorm:1.0",
    "sink:2+window:4000",
    "streamingvlm:1.0+keyformer:1.0",
    "zipvl:1.0?low=0",
    "random:1.0",
    "tova:1.0",
    "keydiff:1.0",
    "lagkv:1.0",
    "chunkkv:1.0",
    "curdkv:1.0",
    "knorm:1.0",
    "h2o:1.0",
    "cam:1.0",
    "capkv:1.0",
    "entropy_chunkkv:1.0",
    "vatp:1.0",
    "leverage:1.0",
    "pyramidkv:1.0",
    "simlayerkv:1.0",
    "criticalkv:1.0",
    "expected_attention:1.0",
    "mixkv:1.0",
    "infinipot_v:1.0",
    "streammem:1.0",
    "livevlm:1.0",
)
SPECS = (
    "snapkv:0.4?window=5&kernel=3",
    "lookm:0.4",
    "sink:2+window:17",
    "sink:2+window:7+snapkv:9?window=4",
    "streamingvlm:0.5",
)
SCORES = (
    "random:0.4",
    "finch:0.4?window=4&chunk=9",
    "compactor:0.4?chunk=7&sink=3",
    "kvzip:0.4?chunk=9",
    "kvsquared:0.4?chunk=9&asks=0.3",
    "kvcompose:0.4?chunk=9",
    "fastkvzip:0.4",
    "tova:0.25",
    "keydiff:0.4",
    "lagkv:0.5?sink=2&lag=4",
    "chunkkv:0.4?window=3&chunk=4",
    "curdkv:0.4",
    "knorm:0.4",
    "h2o:0.4",
    "cam:0.4?merge=5",
    "capkv:0.4?future=20",
    "entropy_chunkkv:0.4?window=3&chunk=4",
    "vatp:0.4?sink=2",
    "leverage:0.4",
    "pyramidkv:0.4?window=3",
    "simlayerkv:0.5?threshold=0.3&window=3",
    "criticalkv:0.5?window=3",
    "expected_attention:0.4?future=20",
    "mixkv:0.4?window=3",
    "infinipot_v:0.5",
    "streammem:0.5?window=3",
    "livevlm:0.5?window=5",
)
PREFILL = (SPECS[0], "lookm:0.4", "zipvl:0.5?low=0")  # act behind a prompt only
# Values that grow, means of queries to come, gates on chunks, and a second reading.
LATEST = tuple(s for s in SCORES if s.startswith(("cam", "capkv", "entropy_chunkkv", "kvcompose")))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("part", range(3))
def test_a_budget_that_keeps_all_changes_no_bit(family: str, part: int) -> None:
    this = tiny(family)
    give_gates(this.model)
    for numbers in ([1], [0, 1]):
        inputs = rows(this, numbers)
        stock = generate(this, inputs, 4)
        for spec in WHOLE[part::3]:
            out = run(this, inputs, spec, tokens=4)
            assert torch.equal(out.sequences, stock.sequences), spec
            assert torch.equal(torch.stack(out.logits), torch.stack(stock.logits)), spec


# They normalise their keys, and with random weights all norms are equal but for rounding.
NORMED = ("gemma3", "lfm2_vl", "qwen3_vl")


@pytest.mark.rest_is_slow(6)
@pytest.mark.parametrize("spec", (*SPECS, *SCORES))
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_ragged_batch_equals_single_rows(family: str, spec: str) -> None:
    if spec.startswith("knorm") and family in NORMED:
        pytest.skip("all norms of its keys are equal")
    this = tiny(family)
    give_gates(this.model)
    batch = rows(this, [0, 1, 2, 3])
    together = run(this, batch, spec)
    for row in range(4):
        single = rows(this, [row])
        alone = run(this, single, spec)
        assert torch.equal(new(together, batch)[row], new(alone, single)[0])
        close(together, alone, row)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [SPECS[0], *LATEST])
def test_rows_of_text_one_picture_and_two(family: str, spec: str) -> None:
    this = tiny(family)
    if "image" not in this.facts.kinds:
        pytest.skip("it sees no pictures")
    texts = ["{image} a", "so what can you tell me of this?", "{image} and {image} what?"]
    images = this.media("image", 3)["images"]
    batch = this.inputs(texts, images=images)
    together = run(this, batch, spec, tokens=5)
    for row, (text, mine) in enumerate(zip(texts, (images[:1], (), images[1:]), strict=True)):
        single = this.inputs([text], images=mine)
        alone = run(this, single, spec, tokens=5)
        assert torch.equal(new(together, batch)[row], new(alone, single)[0])
        close(together, alone, row)


def _text(model: Any, ids: list[list[int]], spec: str | None) -> Any:
    """Three tokens behind left-padded prompts of a model of text alone, and what the cache held."""
    n = max(map(len, ids))
    padded = torch.tensor([[0] * (n - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (n - len(row)) + [1] * len(row) for row in ids])
    with attach(model, cache=spec) as trace:
        out = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=3,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return torch.stack(out.logits), sum(row.tokens_out for row in trace.rows)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", SCORES)
def test_a_model_of_text_alone(spec: str) -> None:
    """A ragged batch equals its rows alone, and a budget that keeps all changes no bit."""
    model = decode_models.tiny().eval()
    give_gates(model)
    ids = [[1 + (i * k) % 23 for i in range(n)] for n, k in ((31, 5), (24, 7), (40, 11))]
    together, held = _text(model, ids, spec)
    alone = [_text(model, [row], spec) for row in ids]
    logits = torch.cat([each for each, _ in alone], 1)
    torch.testing.assert_close(together, logits, atol=1e-4, rtol=0)
    stock, whole = _text(model, ids, f"{spec.partition(':')[0]}:1.0")
    assert torch.equal(stock, _text(model, ids, None)[0])
    assert held < whole and not torch.allclose(together, stock, atol=1e-2)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SPECS)
def test_eager_attention_equals_sdpa(family: str, spec: str) -> None:
    inputs = rows(tiny(family), [1, 3])
    out = [run(tiny(family, attention), inputs, spec) for attention in ("sdpa", "eager")]
    assert torch.equal(out[0].sequences, out[1].sequences)
    close(*out)


@pytest.mark.rest_is_slow(5)
@pytest.mark.parametrize("family", MORE)
@pytest.mark.parametrize("spec", [*PREFILL, *LATEST, SPECS[3], *SCORES[1:3]])
@pytest.mark.parametrize("chunk", [3, 16])
def test_a_prompt_in_chunks_equals_one_piece(family: str, spec: str, chunk: int) -> None:
    """Policies act at the end of the prompt, whatever its chunks; the window spans chunks."""
    this = tiny(family)
    if family == "gemma3":
        pytest.skip("its image tokens see forward, so chunks change the model itself")
    for numbers in ([1], [0, 1]):
        inputs = rows(this, numbers)
        whole = run(this, inputs, spec)
        parts = run(this, inputs, spec, prefill_chunk_size=chunk)
        assert torch.equal(parts.sequences, whole.sequences)
        close(parts, whole)


@pytest.mark.parametrize("family", ["llava_onevision", "qwen3_vl"])
def test_chunks_whose_media_are_cut(family: str) -> None:
    """The last queries of a prompt are known early where the last chunk leaves as many."""
    this, reduce = tiny(family), "divprune:0.5"
    inputs = rows(this, [1])
    chunk = int(inputs["input_ids"].shape[1]) - 6  # two chunks
    with attach(this.model, reduce, cache="snapkv:0.4?window=5"):
        whole, parts = (generate(this, inputs, 4, **k) for k in ({}, {"prefill_chunk_size": chunk}))
    close(parts, whole)
    for spec in ("snapkv:0.4?window=32", "zipcache:0.4"):
        with attach(this.model, reduce, cache=spec):
            generate(this, inputs, 4)
            with pytest.raises(ModelError, match="how many of them reduce= leaves"):
                generate(this, inputs, 4, prefill_chunk_size=7)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", MORE)
@pytest.mark.parametrize("spec", [*SPECS, *LATEST])
def test_beams(family: str, spec: str) -> None:
    this, beams = tiny(family), {"num_beams": 3, "tokens": 5}
    batch = rows(this, [0, 1])
    together = new(run(this, batch, spec, **beams), batch)
    for row in range(2):
        single = rows(this, [row])
        assert torch.equal(together[row], new(run(this, single, spec, **beams), single)[0])


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [*PREFILL, *SPECS[2:], *LATEST])
def test_prompt_lookup_equals_greedy(family: str, spec: str) -> None:
    """Drafts that are taken back evict nothing, and see what is left at their own turn."""
    this = tiny(family)
    inputs = rows(this, [1])
    greedy = run(this, inputs, spec, tokens=12)
    looked = run(this, inputs, spec, tokens=12, prompt_lookup_num_tokens=3)
    assert torch.equal(looked.sequences, greedy.sequences)
    close(looked, greedy)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", MORE)
@pytest.mark.parametrize("spec", [SPECS[0], "lookm:0.4?merge=none"])
def test_a_text_turn_sees_what_is_left(family: str, spec: str) -> None:
    """The second turn against stock layers that hide what had gone by then."""
    this = tiny(family)
    inputs = rows(this, [1])
    length, more = inputs["input_ids"].shape[1], this.inputs([" and now?"])["input_ids"]
    walk = cache_oracle.Walk(this, oracle.embed(this, inputs))
    with attach(this.model, cache=spec):
        one = generate(this, inputs, 4)
        held = {i: cache_oracle.kept(one.past_key_values, i, length) for i in walk.full}
        ids = torch.cat([one.sequences, more], 1)
        two = generate(this, {"input_ids": ids}, 4, past_key_values=one.past_key_values)
    for token in ids[0, length:].tolist():
        walk.step(token, held)
    torch.testing.assert_close(walk.logits, two.logits[0][0], atol=2e-5, rtol=0)
    again = {i: cache_oracle.kept(two.past_key_values, i, ids.shape[1]) for i in walk.full}
    for step, token in enumerate(two.sequences[0, ids.shape[1] : -1].tolist()):
        walk.step(token, again)
        torch.testing.assert_close(walk.logits, two.logits[step + 1][0], atol=2e-5, rtol=0)
    most = max(int(seen[:, length:].sum()) for seen in again.values())
    assert all(seen.sum() < seen.numel() for seen in again.values()) and most > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_other_caches_are_refused(family: str) -> None:
    this = tiny(family)
    inputs = rows(this, [1])
    with pytest.raises(ModelError, match="StaticLayer, which cannot lose entries") as error:
        run(this, inputs, "snapkv:10", past_key_values=StaticCache(this.model.config, 500))
    assert "\n" not in str(error.value)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    if hasattr(cache_utils, "Fp8QuantizedLayer"):  # from 5.21 on
        with pytest.raises(ModelError, match="Fp8QuantizedLayer"):
            run(this, inputs, "snapkv:10", **options)
    untyped = run(this, inputs, "snapkv:10", past_key_values=DynamicCache())
    assert torch.equal(untyped.sequences, run(this, inputs, "snapkv:10").sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_trace_has_a_row(family: str) -> None:
    this = tiny(family)
    inputs = rows(this, [1])
    n = inputs["input_ids"].shape[1]
    with attach(this.model, cache="snapkv:12?window=4") as trace:
        out = generate(this, inputs, 1)
    (row,) = trace.rows
    assert (row.stage, row.tokens_in, row.tokens_out) == ("kv", n, 12)
    layers = out.past_key_values.layers
    assert row.peak_bytes == sum(x.keys.nbytes + x.values.nbytes for x in layers)
    assert [int(x.get_seq_length()) for x in layers] == [n] * len(layers)
