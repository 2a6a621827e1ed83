"""Keys without some channels: the oracle, bytes, ragged rows, chunks, later turns, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_questions import ask, model_of, queries
from cache_runs import close, new, rows, run
from oracles_caches import think
from text_zoo import padded, prompt, text_model, written
from tiny_models import generate, tiny
from transformers import DynamicCache

from mmfast import SpecError
from mmfast.attach import attach
from mmfast.caches.plan import plan_cache
from mmfast.streams.memory import check_plan

SPEC = "think:0.5?window=4&residual=3"


def stock(this: Any) -> DynamicCache:
    cache = DynamicCache(config=this.model.config.get_text_config())
    with torch.no_grad():
        this.model(**ask(this), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_what_is_stored_is_what_the_oracle_leaves(family: str) -> None:
    this = model_of(family)
    inputs = ask(this)
    with attach(this.model, cache=SPEC):
        cache = generate(this, inputs, 1).past_key_values
    seen, whole = 0, stock(this)
    for index, layer in enumerate(cache.layers):
        if not hasattr(layer, "whole"):  # a sliding window is bounded by itself
            continue
        keys, values = whole.layers[index].keys[0], whole.layers[index].values[0]
        width = keys.shape[-1]
        slow = think(keys.double().numpy(), queries(family)[index], round(width / 2), 4, 3)
        found = layer.whole()
        torch.testing.assert_close(found[0][0].double(), torch.as_tensor(slow), atol=1e-5, rtol=0)
        torch.testing.assert_close(found[1][0], values, atol=1e-5, rtol=0)
        gone = (found[0][0, :, :-3] == 0).all(1)
        assert (gone.sum(-1) == width - round(width / 2)).all() and (found[0][0, :, -3:] != 0).all()
        seen += 1
    assert seen


def test_decoding_is_that_of_a_stock_cache_with_zeros() -> None:
    model, ids = text_model("llama"), prompt(40)
    with attach(model, cache=SPEC):
        tokens, logits, out = written(model, {"input_ids": ids}, 5)
    with attach(model, cache=SPEC):
        made = written(model, {"input_ids": ids}, 1)[2].past_key_values
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
        for layer, thin in zip(cache.layers, made.layers, strict=True):
            layer.keys = thin.whole()[0][:, :, :40].clone()
        for step in range(4):
            token = tokens[:, step : step + 1]
            found = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
            torch.testing.assert_close(found[0].float(), logits[0, step + 1], atol=1e-5, rtol=1e-5)
    assert int(out.past_key_values.layers[0].get_seq_length()) == 44


def test_the_trace_tells_the_bytes_that_are_left() -> None:
    model, ids = text_model("llama"), prompt(40)
    held = {}
    for spec in (
        "think:1.0",
        SPEC,
        "think:2?residual=0",
        "snapkv:20?window=5+think:0.5?residual=5",
    ):
        with attach(model, cache=spec) as trace:
            cache = written(model, {"input_ids": ids}, 1)[2].past_key_values
        held[spec] = trace.rows[-1].peak_bytes
    whole, layers = held["think:1.0"], len(cache.layers)
    keys = cache.layers[0].whole()[0]
    _, heads, _, width = keys.shape
    row = layers * heads * keys.element_size()  # bytes of a number of every head
    assert whole == row * 40 * 2 * width
    index = layers * heads * 2  # two bytes of a channel number
    half = round(width / 2)
    assert held[SPEC] == whole - row * 37 * (width - half) + index * half
    assert held["think:2?residual=0"] == whole - row * 40 * (width - 2) + index * 2
    both = row * 20 * 2 * width - row * 15 * (width - half) + index * half
    assert held["snapkv:20?window=5+think:0.5?residual=5"] == both


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_ragged_batch_is_its_rows(family: str) -> None:
    model = text_model(family)
    ids = [prompt(24), prompt(40, 2)]
    with attach(model, cache=SPEC):
        _, logits, _ = written(model, padded(ids), 3)
    for row, mine in enumerate(ids):
        with attach(model, cache=SPEC):
            _, alone, _ = written(model, {"input_ids": mine}, 3)
        torch.testing.assert_close(logits[row], alone[0], atol=1e-5, rtol=1e-5)
    whole = written(model, padded(ids), 3)[1]
    assert not torch.allclose(logits, whole, atol=1e-3)
    with attach(model, cache="think:1.0"):
        assert torch.equal(written(model, padded(ids), 3)[1], whole)


@pytest.mark.parametrize("spec", [SPEC, "knorm:0.5+" + SPEC])
@pytest.mark.parametrize("chunk", [3, 16])
def test_a_prompt_in_chunks_equals_one_piece(spec: str, chunk: int) -> None:
    this = tiny("llava_onevision")
    for numbers in ([1], [0, 1]):
        inputs = rows(this, numbers)
        whole = run(this, inputs, spec)
        parts = run(this, inputs, spec, prefill_chunk_size=chunk)
        assert torch.equal(new(parts, inputs), new(whole, inputs))
        close(parts, whole)


def test_later_turns_and_beams() -> None:
    model, first = text_model("llama"), prompt(30)
    for spec in (SPEC, "compactor:0.5?chunk=8+" + SPEC, "snapkv:1.0+" + SPEC):
        with attach(model, cache=spec) as trace:
            _, _, out = written(model, {"input_ids": first}, 3)
            ids = torch.cat([out.sequences, prompt(20, 5)], 1)
            again = written(model, {"input_ids": ids}, 3, past_key_values=out.past_key_values)
            beams = model.generate(first, max_new_tokens=6, num_beams=3, do_sample=False)
        assert torch.isfinite(again[1]).all() and beams.shape[1] == 36
        assert len(again[2].past_key_values.layers[0].rows[0].packs) == 2
        one, two = (row for row in trace.rows[:2])
        assert one.peak_bytes < two.peak_bytes


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("think", "needs a budget"),
        ("think:0.5?window=0", "window=0"),
        ("think:0.5?residual=-1", "residual=-1"),
        ("think:0.5+rekv:2", "drop one"),
        ("think:0.5+quest:0.1", "drop one"),
        ("think:0.5+quant:4", "both of role"),
        ("zipvl:0.5+think:0.5", "both choose bits"),
        ("snapkv:0.5+adakv+think:0.5", "cannot read"),
    ],
)
def test_refusals_are_one_line(spec: str, why: str) -> None:
    with pytest.raises(SpecError, match=why) as error:
        plan_cache(spec)
    assert "\n" not in str(error.value)


def test_streams_refuse_in_one_line() -> None:
    with pytest.raises(SpecError, match="end of a prompt"):
        check_plan(plan_cache("window:64+think:0.5"))
