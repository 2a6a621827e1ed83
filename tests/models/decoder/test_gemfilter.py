"""GemFilter: two passes, the first of which leaves no trace but its choice."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import FAMILIES, Tiny, generate, tiny
from torch import Tensor
from transformers import StaticCache

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction.inputs import compress


def video(this: Tiny, seed: int = 0) -> dict[str, Any]:
    return this.inputs(["on {video} what?"], videos=this.videos(1, seed))


def mixed(this: Tiny) -> dict[str, Any]:
    return this.inputs(["a {image} b {video} c?"], images=this.images(1), videos=this.videos(1))


def best(family: str, inputs: dict[str, Any], layer: int, item: Tensor, count: int) -> list[int]:
    """The tokens that queries and keys of `layer` rank first."""
    attention = tiny(family, "eager").model(**inputs, output_attentions=True).attentions
    return ranked(attention[layer], item, count)


def ranked(attention: Tensor, item: Tensor, count: int) -> list[int]:
    """A sum of logarithms of attention `[1, H, L, S]` is that of products less a constant."""
    score = attention[0, :, -1].double().log().sum(0)[item].tolist()
    near = [score[max(0, i - 2) : i + 3] for i in range(len(score))]
    means = torch.tensor([sum(part) / len(part) for part in near])
    return sorted(means.topk(count).indices.tolist())


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_choice_and_logits(family: str, attention: str) -> None:
    this = tiny(family, attention)
    inputs = mixed(this)
    prompt = oracle.embed(this, inputs)
    for knob, layer in (("", 2), ("?layer=0", 0), ("?layer=3", 3)):
        with attach(this.model, f"gemfilter:0.3{knob}") as trace:
            logits = this.model(**inputs).logits[0]
        for site, number, reduction in trace.reductions:
            item = prompt.items[number]
            assert site == "pre"
            assert reduction.keep.tolist() == best(family, inputs, layer, item, reduction.m)
        keep = oracle.kept_places(prompt, trace.reductions)
        assert torch.equal(logits, oracle.removed(this, prompt, keep))
        (row,) = trace.rows
        assert (row.stage, row.tokens_in) == ("pre", sum(map(len, prompt.items)))
        assert row.ms > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_equals_recompute_and_all_layers_are_short(family: str) -> None:
    this = tiny(family)
    inputs = mixed(this)
    with attach(this.model, "gemfilter:0.2+fastv@llm2:0.5") as trace:
        out = generate(this, inputs, 10)
    length, new = inputs["input_ids"].shape[1], out.sequences[0, inputs["input_ids"].shape[1] :]
    prompt = oracle.embed(this, inputs)
    whole = oracle.append(this, prompt, new[:-1])
    logits = oracle.masked(this, whole, trace.reductions)[length - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=0)
    first = [r for r in trace.reductions if r[0] == "pre"]
    kept = len(oracle.kept_places(prompt, first)) + 9
    held = [layer.keys.shape[2] for layer in out.past_key_values.layers]
    assert held[:2] == [kept, kept] and held[2] == held[3] < kept
    assert [row.stage for row in trace.rows] == ["pre", "llm2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_after_another_stage_it_reads_what_is_left(family: str) -> None:
    this = tiny(family)
    inputs = video(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, "random:0.5+gemfilter:0.5") as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(prompt, trace.reductions)
    assert torch.equal(logits, oracle.removed(this, prompt, keep))
    (_, _, first), (_, _, last) = trace.reductions
    eager, left = tiny(family, "eager"), oracle.kept_places(prompt, trace.reductions[:1])
    at = torch.isin(left, prompt.items[0]).nonzero()[:, 0]
    assert len(at) == first.m
    weights = oracle.removed(eager, prompt, left, attentions=True)[2]
    assert last.keep.tolist() == ranked(weights, at, last.m)


def test_a_ragged_batch_equals_its_rows() -> None:
    this = tiny("qwen2_5_vl")
    images, videos = this.images(2), this.videos(1)
    batch = this.inputs(["{image} {video} what is it?", "{image}?"], images, videos)
    rows = [
        this.inputs(["{image} {video} what is it?"], images[:1], videos),
        this.inputs(["{image}?"], images[1:]),
    ]
    with attach(this.model, "gemfilter:0.3") as trace:
        together = generate(this, batch, 6)
        alone = [generate(this, row, 6) for row in rows]
    for i, one in enumerate(alone):
        assert together.sequences[i, -6:].tolist() == one.sequences[0, -6:].tolist()
        for step, logits in enumerate(one.logits):
            torch.testing.assert_close(together.logits[step][i], logits[0], atol=1e-4, rtol=0)
    kept = [r.keep.tolist() for _, _, r in trace.reductions]
    assert kept[:3] == kept[3:]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_later_turns_see_the_turns_before(static: bool, padded: bool) -> None:
    """The pass of a second turn attends to the first one, and the cache is left alone."""
    this = tiny("llava_onevision", "eager")
    one = this.inputs(["{image} a?"], images=this.images(1))
    two = this.inputs(["{image} b?"], images=this.images(1, seed=5))
    if padded:
        pad = torch.full((1, 4), this.model.config.get_text_config().pad_token_id)
        ids = torch.cat([pad, one["input_ids"]], 1)
        one |= {"input_ids": ids, "attention_mask": (ids != pad[0, 0]).long()}
    media = {name: two[name] for name in ("pixel_values", "image_sizes")}
    mask = torch.cat([one["attention_mask"], torch.ones_like(two["input_ids"])], 1)
    text = this.model.config.get_text_config()
    cache = StaticCache(text, max_cache_len=512) if static else None
    with attach(this.model, "gemfilter:0.5") as trace:
        first = this.model(**one, past_key_values=cache, use_cache=True)
        cache = first.past_key_values
        second = this.model(two["input_ids"], attention_mask=mask, past_key_values=cache, **media)
    (_, _, before), (_, _, after) = trace.reductions
    # By hand: the first turn as it was kept, then all of the second, in one stock pass.
    plain = {n: v[:, 4:] if padded and v.ndim == 2 else v for n, v in one.items()}
    plain["image_sizes"] = one["image_sizes"]
    prompt, extra = oracle.embed(this, plain), oracle.embed(this, two)
    keep = oracle.kept_places(prompt, [("pre", 0, before)])
    shift = len(prompt.embeds) + (4 if padded else 0)
    start = 4 if padded else 0
    positions = torch.cat([prompt.positions[keep] + start, extra.positions + shift])
    embeds = torch.cat([prompt.embeds[keep], extra.embeds])
    out = this.model.get_decoder()(
        inputs_embeds=embeds[None],
        position_ids=positions[None],
        attention_mask=torch.ones(1, len(embeds), dtype=torch.int64),
        output_attentions=True,
        use_cache=False,
    )
    item = len(keep) + extra.items[0]
    assert after.keep.tolist() == ranked(out.attentions[2], item, after.m)
    left = torch.cat(
        [torch.arange(len(keep)), len(keep) + oracle.kept_places(extra, [("", 0, after)])]
    )
    want = this.model.get_decoder()(
        inputs_embeds=embeds[left][None],
        position_ids=positions[left][None],
        attention_mask=torch.ones(1, len(left), dtype=torch.int64),
        use_cache=False,
    )
    logits = this.model.lm_head(want.last_hidden_state[0])[len(keep) :]
    torch.testing.assert_close(second.logits[0], logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_keeps_the_whole_budget(family: str) -> None:
    this = tiny(family)
    inputs = video(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, "gemfilter:0.3") as trace:
        generate(this, inputs, 3, prefill_chunk_size=16)
    n = len(prompt.items[0])
    assert len(trace.reductions) > 1
    assert sum(r.n for _, _, r in trace.reductions) == n
    assert sum(r.m for _, _, r in trace.reductions) == round(0.3 * n)


def test_beams_and_static_caches() -> None:
    this = tiny("qwen2_5_vl")
    videos = this.videos(2)
    both = this.inputs(["{video} a", "what is {video}?"], videos=videos)
    with attach(this.model, "gemfilter:0.3"):
        plain = generate(this, both, 6)
        static = generate(this, both, 6, cache_implementation="static", disable_compile=True)
        beams = generate(this, both, 6, num_beams=2)
        alone = generate(this, this.inputs(["{video} a"], videos=videos[:1]), 6, num_beams=2)
    assert torch.equal(plain.sequences, static.sequences)
    assert torch.equal(beams.sequences[0, -6:], alone.sequences[0, -6:])


def test_outputs_asked_for_are_those_of_the_second_pass() -> None:
    this = tiny("qwen3_vl")
    inputs = video(this)
    with attach(this.model, "gemfilter:0.3"):
        out = this.model(**inputs, output_hidden_states=True)
    assert len(out.hidden_states) == 5
    assert len({state.shape for state in out.hidden_states[1:]}) == 1
    assert out.hidden_states[-1].shape[1] == out.logits.shape[1]


def test_keep_all_is_stock_and_runs_one_pass() -> None:
    this = tiny("qwen3_vl")
    inputs = video(this)
    stock = this.model(**inputs).logits
    calls: list[int] = []
    handle = (
        this.model.get_decoder().layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    )
    with attach(this.model, "gemfilter:1.0"):
        assert torch.equal(this.model(**inputs).logits, stock)
    with attach(this.model, "gemfilter:0.5"):
        this.model(**inputs)
    handle.remove()
    assert len(calls) == 1 + 2
    assert torch.equal(this.model(**inputs).logits, stock)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("gemfilter:0.5?layer=4", "layer=4 .*choose 0 to 3"),
        ("gemfilter:0.5?layer=-1", "layer=-1 .*choose 0 to 3"),
        ("gemfilter:0.5+random:0.5", "'random@pre:0.5' cannot follow 'gemfilter@pre:0.5'"),
    ],
)
def test_errors(spec: str, words: str) -> None:
    with pytest.raises(SpecError, match=words), attach(tiny("qwen3_vl").model, spec):
        pass


def test_inputs_cannot_be_compressed_ahead() -> None:
    this = tiny("qwen2_5_vl")
    with pytest.raises((SpecError, ModelError), match="attach"):
        compress(this.model, video(this), "gemfilter:0.5")
