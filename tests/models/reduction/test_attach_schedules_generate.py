"""Stock `generate` in all its ways, with schedules attached."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import FAMILIES, generate, mixed_prompt, tiny, video_prompt

from mmfast.attach import attach
from mmfast.core.errors import ModelError

SPECS = ("pyramiddrop:0.2", "adaptinfer:6")
MIXED = "random:0.6+pyramiddrop:0.2+fastv@llm2:0.9"


def new(out: Any, inputs: dict[str, Any]) -> torch.Tensor:
    return out.sequences[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_a_recompute(family: str) -> None:
    this = tiny(family)
    inputs = mixed_prompt(this)
    for spec in (SPECS[1], MIXED):
        with attach(this.model, spec) as trace:
            out = generate(this, inputs, 10)
        tokens = new(out, inputs)[0]
        whole = oracle.append(this, oracle.embed(this, inputs), tokens[:-1])
        logits = oracle.masked(this, whole, trace.reductions)[inputs["input_ids"].shape[1] - 1 :]
        torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[1], MIXED])
def test_a_ragged_batch_equals_single_rows(family: str, spec: str) -> None:
    this = tiny(family)
    prompts = ["{video} a", "so what is {video} then?", "is {video}?"]
    videos = this.videos(2) + this.videos(1, 7, frames=6 if family != "llava_onevision" else 4)
    with attach(this.model, spec):
        together = generate(this, batch := this.inputs(prompts, videos=videos), 5)
        for row, prompt in enumerate(prompts):
            alone = generate(this, one := this.inputs([prompt], videos=videos[row : row + 1]), 5)
            assert torch.equal(new(together, batch)[row], new(alone, one)[0])
            a = torch.stack([step[row] for step in together.logits])
            b = torch.stack([step[0] for step in alone.logits])
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def real(layer: Any) -> int:
    """Keys of a cache layer; a chunk of which nothing is left stands as one of padding."""
    valid = getattr(layer, "valid", None)
    return layer.keys.shape[2] - (0 if valid is None else int((~valid).sum()))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size", [5, 16])
def test_chunked_prefill_keeps_the_whole_budget(family: str, size: int) -> None:
    this = tiny(family)
    inputs = video_prompt(this)
    (item,) = oracle.embed(this, inputs).items
    with attach(this.model, "pyramiddrop:0.2") as trace:
        out = generate(this, inputs, 3, prefill_chunk_size=size)
    for site, share in (("llm1", 1 / 3), ("llm2", 2 / 3), ("llm3", 1.0)):
        parts = [r for name, _, r in trace.reductions if name == site]
        last = round(0.2 * len(item))
        assert sum(r.m for r in parts) == round(len(item) * (last / len(item)) ** share)
    text = inputs["input_ids"].shape[1] - len(item)
    layers = out.past_key_values.layers
    assert real(layers[0]) == text + len(item) + 2 and real(layers[3]) == text + last + 2


def test_text_signals_under_chunked_prefill_say_what_to_do() -> None:
    this = tiny("qwen2_5_vl")
    with attach(this.model, "adaptinfer:0.2"), pytest.raises(ModelError, match="chunk of it"):
        generate(this, video_prompt(this), 3, prefill_chunk_size=16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_turn_has_a_schedule_of_its_own(family: str) -> None:
    this = tiny(family)
    one, two = video_prompt(this), this.inputs(["{image} b?"], images=this.images(1))
    with attach(this.model, "pyramiddrop:0.2") as trace:
        cache = generate(this, one, 4).past_key_values
        before = len(trace.reductions)
        past = int(cache.get_seq_length())
        extra = oracle.embed(this, two)
        start = int(oracle.positions_of(this, one).max()) + 4
        positions = (
            extra.positions if extra.positions.ndim == 1 else extra.positions[:, None]
        ) + start
        media = {k: v for k, v in two.items() if k not in ("attention_mask", "input_ids")}
        if extra.positions.ndim > 1:
            rows = torch.arange(past, past + positions.shape[-1])[None, None]
            positions = torch.cat([rows, positions])
        else:
            positions = torch.arange(past, past + len(positions))[None]
        logits = this.model(
            two["input_ids"], past_key_values=cache, position_ids=positions, **media
        ).logits[0]
    own = trace.reductions[before:]
    n = len(extra.items[0])
    assert [site for site, _, _ in own] == ["llm1", "llm2", "llm3"]
    assert own[-1][2].m == round(0.2 * n) and own[0][2].n == n
    assert len(logits) == len(oracle.kept_places(extra, own))


def test_beams_and_static_caches() -> None:
    this = tiny("qwen2_5_vl")
    inputs = this.inputs(["{video} a", "what is {video}?"], videos=this.videos(2))
    with attach(this.model, MIXED):
        plain = generate(this, inputs, 5)
        static = generate(this, inputs, 5, cache_implementation="static", disable_compile=True)
        beams = generate(this, inputs, 5, num_beams=2)
        single = generate(
            this, this.inputs(["{video} a"], videos=this.videos(2)[:1]), 5, num_beams=2
        )
    assert torch.equal(plain.sequences, static.sequences)
    assert torch.equal(beams.sequences[0, -5:], single.sequences[0, -5:])


def test_compiled_decoding_of_a_static_cache() -> None:
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    with attach(this.model, SPECS[0]):
        plain = generate(this, inputs, 4)
        compiled = generate(this, inputs, 4, cache_implementation="static")
    assert torch.equal(plain.sequences, compiled.sequences)


@pytest.mark.parametrize("family", FAMILIES)
def test_keep_all_is_bit_identical(family: str) -> None:
    this = tiny(family)
    inputs = video_prompt(this)
    stock = generate(this, inputs, 4)
    for spec in ("pyramiddrop:1.0", "adaptinfer:1.0", "fastkv:1.0", "slimfer:1.0"):
        with attach(this.model, spec) as trace:
            out = generate(this, inputs, 4)
        assert torch.equal(torch.cat(out.logits), torch.cat(stock.logits))
        assert not trace.reductions and {row.stage for row in trace.rows} <= {
            "llm1",
            "llm2",
            "llm3",
        }
