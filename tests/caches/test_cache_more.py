"""Policies beside reductions, in threads, copies and later turns; what is left behind: nothing."""

from __future__ import annotations

import copy
import threading

import cache_oracle
import pytest
import torch
from attach_states import snapshot
from attach_turns import second_turn
from cache_runs import MORE, close, new, rows, run
from tiny_base import by_name
from tiny_models import FAMILIES, build, generate, tiny

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.core.registry import register, unregister
from mmfast.models.reduction.cache_layers import shorten
from mmfast.models.reduction.inputs import compress

SPECS = (
    "snapkv:0.4?window=5",
    "sink:2+window:13",
    "lookm:0.4+quant:8?residual=4&group=4",
    "rekv:1",
)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", MORE)
@pytest.mark.parametrize("spec", SPECS[:3])
def test_reduced_before_the_llm_equals_a_shorter_prompt(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = rows(this, [1])
    with attach(this.model, "random:0.5", spec):
        both = generate(this, inputs, 6)
    short = compress(this.model, inputs, "random:0.5")
    if "lookm" in spec and "inputs_embeds" in short:  # before 5.18
        pytest.skip("embeddings do not tell text from media, which LOOK-M treats in two ways")
    alone = run(this, short, spec, tokens=6)
    assert torch.equal(new(both, inputs), new(alone, short))
    close(both, alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_reduced_inside_the_llm_equals_slicing_by_hand(family: str) -> None:
    this, reduce = tiny(family), "random:0.5+fastv@llm2:0.5"
    inputs = rows(this, [1])
    with attach(this.model, reduce, "sink:2+window:9") as trace:
        both = generate(this, inputs, 6)
    assert [row.stage for row in trace.rows] == ["pre", "llm2", "kv"]
    with attach(this.model, reduce):
        hand = generate(this, inputs, 1)
        cache, sequence, logits = hand.past_key_values, hand.sequences, list(hand.logits)
        for _ in range(5):
            for index in range(len(cache.layers)):
                layer = shorten(cache, index)
                gone = layer.keys.shape[2] - 11
                for name in ("keys", "values"):
                    whole = getattr(layer, name)
                    setattr(layer, name, torch.cat([whole[:, :, :2], whole[:, :, -9:]], 2))
                layer.dropped += gone
            given = {"input_ids": sequence}
            step = generate(this, given, 1, past_key_values=cache)
            sequence = step.sequences
            logits += step.logits
    assert torch.equal(sequence, both.sequences)
    torch.testing.assert_close(torch.cat(logits), torch.cat(both.logits), atol=2e-5, rtol=0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SPECS)
def test_threads_and_copies_do_not_mix(family: str, spec: str) -> None:
    this = tiny(family)
    asks = [rows(this, [n]) for n in range(3)]
    alone = [run(this, inputs, spec, tokens=6).sequences for inputs in asks]
    found: dict[int, torch.Tensor] = {}
    with attach(this.model, cache=spec):

        def work(number: int) -> None:
            found[number] = generate(this, asks[number], 6).sequences

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        first = generate(this, asks[0], 3)
        branch = copy.deepcopy(first.past_key_values)
        given = {"input_ids": first.sequences}
        ends = [
            generate(this, given, 3, past_key_values=cache).sequences
            for cache in (first.past_key_values, branch)
        ]
    assert all(torch.equal(found[n], alone[n]) for n in range(3))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], alone[0])


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", SPECS)
def test_a_second_video_finds_room(family: str, spec: str) -> None:
    """The later prompt is evicted with what is left of the first; the logical length goes on."""
    this = tiny(family)
    first = this.inputs(["on {video} what?"], videos=this.videos(1))
    with attach(this.model, cache=spec) as trace:
        one = generate(this, first, 3)
        whole, part = second_turn(this, first, one.sequences, seed=9)
        names = ("pixel_values_videos", "video_grid_thw")
        call = {k: part[k] for k in names if k in part}
        given = {k: v for k, v in whole.items() if k not in ("pixel_values_videos",)}
        encode = this.model.model.get_video_features
        features = encode(**by_name(encode, call), return_dict=True)
        given["mm_encoder_outputs"] = {"video": features}
        if family == "llava_onevision":
            given.pop("mm_token_type_ids", None)
        two = generate(this, given, 3, past_key_values=one.past_key_values)
    length = whole["input_ids"].shape[1] + 2
    assert all(int(layer.get_seq_length()) == length for layer in two.past_key_values.layers)
    rows_ = [row for row in trace.rows if row.stage == "kv"]
    assert len(rows_) == 2 and rows_[1].tokens_in > rows_[0].tokens_out
    if spec == SPECS[1]:
        assert rows_[1].tokens_out == 15
    if spec == SPECS[0]:
        seen = cache_oracle.kept(two.past_key_values, 0, length)
        n = first["input_ids"].shape[1]
        assert 0 < seen[:, :n].sum() < seen[:, :n].numel() and seen[:, n:].any()


def test_leaving_restores_everything() -> None:
    this = build("qwen3_vl")
    inputs = rows(this, [1])
    generate(this, inputs, 2)
    before = snapshot(this)
    for spec in SPECS:
        with attach(this.model, cache=spec):
            generate(this, inputs, 3)
        assert snapshot(this) == before
        with pytest.raises(RuntimeError, match="stop"), attach(this.model, cache=spec):
            raise RuntimeError("stop")
        assert snapshot(this) == before


def test_an_error_in_a_call_leaves_the_next_one_clean() -> None:
    this = tiny("llava_onevision")
    inputs = rows(this, [1])
    for spec in SPECS:
        expected = run(this, inputs, spec, tokens=4).sequences
        with attach(this.model, cache=spec):
            with pytest.raises(Exception, match=r"."):
                this.model(**{**inputs, "input_ids": inputs["input_ids"][:, :5]})
            assert torch.equal(generate(this, inputs, 4).sequences, expected)


def test_a_policy_that_scores_at_every_step() -> None:
    """Attention of generated tokens counts, and the budget holds from step to step."""

    @register(
        "heavy", kind="cache", needs=("attn_sum",), role="score", moment="always", sites=("kv",)
    )
    def heavy(tokens: mmfast.Tokens, budget: int) -> mmfast.Reduction:
        """Keep the last token and the heaviest others."""
        score = tokens.need("attn_sum").clone()
        score[..., -1] = torch.inf
        return mmfast.Reduction.prune(score.topk(budget, -1).indices, tokens.n)

    try:
        for family in FAMILIES:
            this = tiny(family)
            inputs = rows(this, [0, 1])
            out = run(this, inputs, "heavy:12", tokens=8)
            assert {layer.keys.shape[2] for layer in out.past_key_values.layers} == {13}
            single = rows(this, [1])
            close(out, run(this, single, "heavy:12", tokens=8), 1)
            layer = run(this, single, "heavy:12", tokens=8).past_key_values.layers[1]
            n = single["input_ids"].shape[1]
            # Every query but the last one, which nobody asked yet, has given its share.
            total = layer.notes["total"].sum(-1)
            assert bool((total < n + 7).all()) and bool((total > 0).all())
    finally:
        unregister("heavy", "cache")


def test_tokens_that_come_back_are_not_evicted() -> None:
    this = tiny("llava_onevision")
    with (
        pytest.raises(SpecError, match="lazyllm"),
        attach(this.model, "lazyllm@llm2:0.5", "snapkv:9"),
    ):
        pass
