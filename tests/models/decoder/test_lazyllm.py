"""LazyLLM: tokens come back at the step that asks for them, and see what they may see."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from dense_layers import run, weights_of
from tiny_models import FAMILIES, Tiny, generate, tiny, video_prompt
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mmfast.attach import attach
from mmfast.core.errors import ModelError, SpecError
from mmfast.models.reduction.revival import DroppedTokens

SPEC = "lazyllm@llm2:0.2"
DRAFTS = r"the answer may differ from that of greedy decoding; leave out the draft"


def mixed(this: Tiny) -> dict[str, Any]:
    return this.inputs(["a {image} b {video} c?"], images=this.images(1), videos=this.videos(1))


def dense(
    this: Tiny, prompt: oracle.Prompt, start: int, layer: int, counts: list[int]
) -> tuple[Tensor, list[set[int]]]:
    """Logits `[L, V]` of one pass over everything, nothing dropped, by rows of a mask.

    Before `layer` everybody sees everything before them. From there on a token is written with the
    mask of the step in which it arrives: who is there by then and stands before it.

    Args:
        this: An eager model, whose weights are read.
        prompt: Prompt and generated tokens; those from `start` on came one by one.
        start: Length of the prompt.
        layer: The cut.
        counts: Tokens to keep of each item.
    """
    text = this.model.get_decoder()
    hidden, length = prompt.embeds[None], len(prompt.embeds)
    positions = prompt.positions
    places = text.rotary_emb(hidden, positions[None] if positions.ndim == 1 else positions[:, None])
    causal = torch.ones(length, length).tril().bool()
    for index in range(layer):
        weights = weights_of(text.layers[index], hidden, causal, places)
        hidden = run(text.layers[index], hidden, causal, places)
        if index < len(prompt.planes):
            hidden = hidden + prompt.planes[index]

    def best(query: int) -> set[int]:
        score = weights[query]
        found: set[int] = set()
        for item, count in zip(prompt.items, counts, strict=True):
            found |= {int(item[i]) for i in score[item].topk(count).indices}
        return found

    visual = {int(i) for item in prompt.items for i in item}
    there = {i for i in range(start) if i not in visual} | best(start - 1)
    mask = torch.eye(length).bool()
    for query in there:
        mask[query, [i for i in there if i <= query]] = True
    history = []
    for query in range(start, length):
        back = best(query) - there
        history.append(back)
        there |= back | {query}
        for new in back | {query}:
            mask[new, [i for i in there if i <= new]] = True
    for index in range(layer, len(text.layers)):
        hidden = run(text.layers[index], hidden, mask, places)
    return this.model.lm_head(text.norm(hidden[0])), history


def answer(this: Tiny, inputs: dict[str, Any], spec: str, tokens: int) -> tuple[Any, Any]:
    with attach(this.model, spec) as trace:
        return generate(this, inputs, tokens), trace


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["video", "mixed"])
def test_every_step_equals_a_dense_pass(family: str, attention: str, kind: str) -> None:
    this, eager = tiny(family, attention), tiny(family, "eager")
    inputs = {"video": video_prompt, "mixed": mixed}[kind](this)
    out, trace = answer(this, inputs, SPEC, 14)
    start = inputs["input_ids"].shape[1]
    whole = oracle.append(this, oracle.embed(this, inputs), out.sequences[0, start:-1])
    counts = [round(0.2 * len(item)) for item in whole.items]
    logits, history = dense(eager, whole, start, 2, counts)
    torch.testing.assert_close(torch.cat(out.logits), logits[start - 1 :], atol=1e-4, rtol=0)
    rows = [row.tokens_out for row in trace.rows if row.stage == "revive"]
    assert rows == [len(back) for back in history if back]
    assert len(rows) > 2 and len({len(back) for back in history}) > 1
    kept = [(item, r) for _, item, r in trace.reductions]
    assert [r.m for _, r in kept] == counts
    # The tokens that came back are in the deep layers only.
    held = [layer.keys.shape[2] for layer in out.past_key_values.layers]
    gone = sum(r.n - r.m for _, r in kept)
    assert held[2:] == [held[0] - gone + sum(rows)] * 2
    lengths = [int(layer.get_seq_length()) for layer in out.past_key_values.layers]
    assert lengths == [start + 13] * 4


def test_the_dense_pass_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come back must not see what stands behind them, nor stay away."""
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    right, _ = answer(this, inputs, SPEC, 10)
    away, _ = answer(this, inputs, "fastv@llm2:0.2", 10)
    assert not torch.allclose(torch.cat(right.logits), torch.cat(away.logits), atol=1e-3)
    original = DroppedTokens.wanted
    monkeypatch.setattr(DroppedTokens, "wanted", lambda s, scores: original(s, scores.roll(3)))
    wrong, _ = answer(this, inputs, SPEC, 10)
    assert not torch.allclose(torch.cat(right.logits), torch.cat(wrong.logits), atol=1e-3)


def test_default_depth_and_other_stages_before() -> None:
    this = tiny("qwen2_5_vl")
    inputs = video_prompt(this)
    _, trace = answer(this, inputs, "evs:0.5+fastv@llm1:0.6+lazyllm@llm2:0.5", 6)
    assert [row.stage for row in trace.rows[:3]] == ["pre", "llm1", "llm2"]
    _, trace = answer(this, inputs, "lazyllm:0.3", 6)
    assert trace.rows[0].stage == "llm1"


def test_after_a_stage_before_the_llm_it_is_still_dense_equal() -> None:
    this, eager = tiny("llava_onevision"), tiny("llava_onevision", "eager")
    inputs = video_prompt(this)
    out, trace = answer(this, inputs, "random:0.5+lazyllm@llm1:0.3", 10)
    start = inputs["input_ids"].shape[1]
    prompt = oracle.embed(this, inputs)
    keep = oracle.kept_places(prompt, trace.reductions[:1])
    items = [torch.searchsorted(keep, prompt.items[0][trace.reductions[0][2].keep])]
    short = oracle.Prompt(prompt.embeds[keep], prompt.positions[keep], items)
    new = out.sequences[0, start:-1]
    whole = oracle.append(this, short, new)
    whole.positions[len(keep) :] = start + torch.arange(len(new))
    logits, _ = dense(eager, whole, len(keep), 1, [trace.reductions[1][2].m])
    torch.testing.assert_close(torch.cat(out.logits), logits[len(keep) - 1 :], atol=1e-4, rtol=0)


def test_a_second_turn_joins_the_first() -> None:
    """Text in between, then another image: both may come back, and a crop is followed."""
    this, eager = tiny("llava_onevision"), tiny("llava_onevision", "eager")
    one, two = video_prompt(this), this.inputs([" {image} b?"], images=this.images(1))
    media = {name: two[name] for name in ("pixel_values", "image_sizes")}
    feed = torch.tensor([[65, 66, 67]])
    with attach(this.model, "lazyllm@llm1:0.3") as trace:
        cache = this.model(**one, use_cache=True).past_key_values
        this.model(feed, past_key_values=cache)
        this.model(torch.tensor([[70, 71]]), past_key_values=cache)
        cache.crop(-2)
        this.model(two["input_ids"], past_key_values=cache, **media)
        steps = [
            this.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1]
            for token in (72, 73, 74, 75)
        ]
    first, second = oracle.embed(this, one), oracle.embed(this, two)
    tail = torch.tensor([72, 73, 74, 75])
    lengths = len(first.embeds) + 3 + len(second.embeds)
    table = this.model.get_input_embeddings()
    embeds = torch.cat([first.embeds, table(feed[0]), second.embeds, table(tail)])
    offset = len(first.embeds) + 3
    items = [first.items[0], second.items[0] + offset]
    counts = [r.m for _, _, r in trace.reductions]
    prompt = oracle.Prompt(embeds, torch.arange(len(embeds)), items)
    # The first turn was cut by its own last token, so it is given as it was.
    logits = turns(eager, prompt, counts, trace, offset, lengths)
    torch.testing.assert_close(torch.stack(steps), logits, atol=1e-4, rtol=0)


def turns(
    this: Tiny, prompt: oracle.Prompt, counts: list[int], trace: Any, offset: int, start: int
) -> Tensor:
    """The dense pass of two turns whose cuts are known, for the tokens from `start` on."""
    text, length = this.model.get_decoder(), len(prompt.embeds)
    hidden = prompt.embeds[None]
    places = text.rotary_emb(hidden, prompt.positions[None])
    causal = torch.ones(length, length).tril().bool()
    weights = weights_of(text.layers[0], hidden, causal, places)
    hidden = run(text.layers[0], hidden, causal, places)
    kept = [item[r.keep] for item, (_, _, r) in zip(prompt.items, trace.reductions, strict=True)]
    mask = torch.eye(length).bool()
    visual = {int(i) for item in prompt.items for i in item}
    there = {i for i in range(start) if i not in visual} | {int(i) for k in kept for i in k}
    for query in there:
        mask[query, [i for i in there if i <= query]] = True
    came = 0
    for query in range(start, length):
        found: set[int] = set()
        for item, count in zip(prompt.items, counts, strict=True):
            found |= {int(item[i]) for i in weights[query][item].topk(count).indices}
        back = found - there
        came += len(back)
        there |= back | {query}
        for new in back | {query}:
            mask[new, [i for i in there if i <= new]] = True
    assert came > 0
    for index in range(1, len(text.layers)):
        hidden = run(text.layers[index], hidden, mask, places)
    return this.model.lm_head(text.norm(hidden[0]))[start:]


def test_keep_all_is_stock_and_nothing_stays_behind() -> None:
    this = tiny("qwen3_vl")
    inputs = video_prompt(this)
    stock = generate(this, inputs, 5)
    out, trace = answer(this, inputs, "lazyllm@llm2:1.0", 5)
    assert torch.equal(torch.cat(out.logits), torch.cat(stock.logits)) and not trace.reductions
    answer(this, inputs, SPEC, 5)
    assert torch.equal(torch.cat(generate(this, inputs, 5).logits), torch.cat(stock.logits))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"prefill_chunk_size": 16}, "prefill_chunk_size"),
        ({"cache_implementation": "static", "disable_compile": True}, "DynamicCache"),
    ],
)
def test_what_it_does_not_serve(options: dict[str, Any], words: str) -> None:
    this = tiny("qwen2_5_vl")
    with attach(this.model, SPEC), pytest.raises(ModelError, match=words):
        generate(this, video_prompt(this), 3, **options)


def test_where_it_cannot_stand() -> None:
    deep = tiny("qwen3_vl")
    with attach(deep.model, "lazyllm@llm1:0.2"), pytest.raises(ModelError, match="DeepStack"):
        deep.model(**video_prompt(deep))
    for spec in ("lazyllm@llm1:0.5+fastv@llm2:0.5", "fastv@llm2:0.5+lazyllm@llm2:0.5"):
        with pytest.raises(SpecError, match="put 'lazyllm' last"), attach(deep.model, spec):
            pass
    this = tiny("llava_onevision")
    with attach(this.model, "lazyllm@llm0:0.5"), pytest.raises(ModelError, match="K must be"):
        this.model(**video_prompt(this))


def test_without_a_cache_it_is_a_plain_cut() -> None:
    this = tiny("qwen2_5_vl")
    inputs = video_prompt(this)
    with attach(this.model, SPEC):
        lazy = this.model(**inputs, use_cache=False).logits
    with attach(this.model, "fastv@llm2:0.2"):
        assert torch.equal(this.model(**inputs, use_cache=False).logits, lazy)


def test_a_store_of_text_follows_drafts() -> None:
    """Drafts of prompt lookup reach the cut's layer uncut; its store has each of its entries."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 5}
    config = LlamaConfig(vocab_size=23, num_attention_heads=4, eos_token_id=None, **sizes)
    model, prompt = LlamaForCausalLM(config).eval(), torch.randint(3, 23, (1, 61))
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    told = pytest.warns(UserWarning, match=DRAFTS)
    with attach(model, "lazyllm@llm2:0.4?tokens=text"), told:
        out = model.generate(
            prompt, prompt_lookup_num_tokens=3, return_dict_in_generate=True, **options
        )
    layers = out.past_key_values.layers
    (row,), left = layers[2].store, layers[2].keys.shape[2]
    assert out.sequences.shape[1] == 77
    present = row.present[:left].tolist()  # the last drafts are taken back before the next call
    assert len(set(present)) == left
    assert max(present) == layers[0].keys.shape[2] - 1


@pytest.mark.parametrize("by", ["prompt_lookup_num_tokens", "assistant_model"])
def test_drafts_of_generate_are_told_once(by: str) -> None:
    """Several tokens at once bring nothing back, so the answer may be another."""
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    how = {by: 3 if by.startswith("prompt") else tiny("llava_onevision", "eager").model}
    with attach(this.model, SPEC) as trace:
        with pytest.warns(UserWarning, match=DRAFTS) as told:
            generate(this, inputs, 9, **how)
        generate(this, inputs, 9, **how)  # a second warning would be an error
        generate(this, inputs, 5)
    assert len(told) == 1 and [str(told[0].message)] == trace.notes


def test_drafts_behind_a_cut_that_keeps_all_are_not_told() -> None:
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    stock = generate(this, inputs, 9)
    with attach(this.model, "lazyllm@llm2:1.0") as trace:
        found = generate(this, inputs, 9, prompt_lookup_num_tokens=3)
    assert torch.equal(found.sequences, stock.sequences) and not trace.notes
