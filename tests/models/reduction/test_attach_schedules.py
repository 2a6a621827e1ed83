"""Schedules in a model: several cuts, one budget, everything else stock."""

from __future__ import annotations

import model_oracle as oracle
import pytest
import torch
from dense_layers import heads_of, run
from oracle_base import Item
from oracles_compose import saint
from tiny_models import FAMILIES, mixed_prompt, tiny, video_prompt
from torch import Tensor

from mmfast.attach import attach
from mmfast.core.errors import SpecError
from mmfast.core.reduction import Reduction

SPECS = ("pyramiddrop:0.2", "adaptinfer:6", "fastkv:0.3?kernel=3", "slimfer:0.25?block=4")
SPECS += ("dart@llm2:0.3", "prunevid_inner:7", "ivc_prune:0.4")
MIXED = "random:0.6+pyramiddrop:0.2+fastv@llm2:0.9"


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [*SPECS, MIXED])
def test_logits_equal_masking(family: str, spec: str) -> None:
    this = tiny(family)
    inputs = mixed_prompt(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, spec) as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(prompt, trace.reductions)
    expected = oracle.masked(this, prompt, trace.reductions)[keep]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    if spec != MIXED:
        budget = spec.split(":")[1].split("?")[0]
        for number, item in enumerate(prompt.items):
            last = [r for _, n, r in trace.reductions if n == number][-1]
            assert last.m == (round(float(budget) * len(item)) if "." in budget else int(budget))


def scores(name: str, heads: Tensor, alive: Tensor, item: Tensor, text: Tensor) -> Tensor:
    """What a method ranks `item` by, from the weights `[H, L, L]` of the layer before."""
    weights = heads.mean(0)
    if name == "pyramiddrop":
        return weights[-1, item]
    if name == "adaptinfer":
        words = text[text > item[-1]]
        square = heads[:, words][:, :, words]
        worth = (square + square.mT - torch.diag_embed(square.diagonal(dim1=1, dim2=2))).sum(1)
        return (heads[:, words][:, :, item] * worth[..., None]).sum((0, 1))
    rows = alive.nonzero()[:, 0][-8:]
    return weights[rows][:, item].mean(0)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["pyramiddrop", "adaptinfer", "slimfer"])
def test_every_cut_reads_the_true_attention(family: str, name: str) -> None:
    """A dense pass chooses for itself at every cut, and chooses the same."""
    this, eager = tiny(family), tiny(family, "eager")
    inputs = video_prompt(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, f"{name}:0.2" + ("?block=1" if name == "slimfer" else "")) as trace:
        this.model(**inputs)
    decoder, (item,) = eager.model.get_decoder(), prompt.items
    ids, hidden = inputs["input_ids"][0], prompt.embeds[None]
    text = (ids != this.model.config.video_token_id).nonzero()[:, 0]
    positions = prompt.positions[None] if prompt.positions.ndim == 1 else prompt.positions[:, None]
    places = decoder.rotary_emb(hidden, positions)
    alive, cuts = torch.ones(len(ids), dtype=torch.bool), list(trace.reductions)
    weights = torch.empty(0)
    for index, layer in enumerate(decoder.layers):
        if index > 0:
            site, _, reduction = cuts.pop(0)
            best = scores(name, weights, alive, item, text).topk(reduction.m).indices
            assert site == f"llm{index}" and reduction.keep.tolist() == sorted(best.tolist())
            alive[item] = False
            item = item[reduction.keep]
            alive[item] = True
        mask = torch.ones(len(ids), len(ids)).tril().bool()
        mask &= alive[None] | torch.eye(len(ids)).bool()
        weights = heads_of(layer, hidden, mask, places)
        hidden = run(layer, hidden, mask, places)
        if index < len(prompt.planes):
            hidden = hidden + prompt.planes[index]
    assert not cuts


MERGING = ["visiondrop@llm:0.2", "visiondrop@llm2:0.3", "saint@llm1:0.4", "sparsevlm:0.3"]


@pytest.mark.parametrize("spec", [*MERGING, "framefusion@llm1:0.4?tau=0.0"])
def test_merging_inside_the_llm(spec: str) -> None:
    for family in ("llava_onevision", "qwen3_vl"):
        this = tiny(family)
        inputs = video_prompt(this)
        prompt = oracle.embed(this, inputs)
        with attach(this.model, spec) as trace:
            logits = this.model(**inputs).logits[0]
        keep = oracle.kept_places(prompt, trace.reductions)
        expected = oracle.masked(this, prompt, trace.reductions)[keep]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        share = float(spec.split(":")[1].split("?")[0])
        assert trace.reductions[-1][2].m == round(share * len(prompt.items[0]))


@pytest.mark.parametrize("family", ["llava_onevision", "qwen2_5_vl", "qwen3_vl"])
def test_layers_vote_one_after_the_other(family: str) -> None:
    """SAINT as its authors run it in a decoder: one round by the keys of each of several layers."""
    this, tau = tiny(family), 0.3
    inputs = video_prompt(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, "+".join(f"saint@llm{k}?tau={tau}" for k in (1, 2, 3))) as trace:
        output = this.model(**inputs)
    (item,), alive, shares = prompt.items, torch.arange(len(prompt.embeds)), []
    for index, (site, _, reduction) in enumerate(trace.reductions):
        keys = output.past_key_values.layers[index].keys[0].double().mean(0)  # [L, d]
        want = saint(Item(keys[torch.isin(alive, item)].numpy()), None, tau)
        assert site == f"llm{index + 1}" and reduction.keep.tolist() == want.keep
        shares.append(reduction.m / len(item))
        left = item[reduction.keep]
        alive = alive[~torch.isin(alive, item) | torch.isin(alive, left)]
        item = left
    assert len(shares) == 3 and min(shares) < 1
    keep = oracle.kept_places(prompt, trace.reductions)
    expected = oracle.masked(this, prompt, trace.reductions)[keep]
    torch.testing.assert_close(output.logits[0], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("spec", ["fastkv:0.5", "pyramiddrop:0.5"])
def test_a_schedule_counts_what_a_smaller_raster_has_left(spec: str) -> None:
    """It may be less than the budget of the raster, with which a forecast counts."""
    this = tiny("llava_onevision")
    with attach(this.model, f"downsample@pre:0.7+{spec}") as trace:
        this.model(**video_prompt(this))
    first, *cuts = [reduction for _, _, reduction in trace.reductions]
    assert first.m < round(0.7 * first.n) and round(0.5 * first.m) != round(0.35 * first.n)
    assert cuts[0].n == first.m and cuts[-1].m == round(0.5 * first.m)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trace_has_a_row_per_cut(attention: str) -> None:
    this = tiny("qwen2_5_vl", attention)
    with attach(this.model, "pyramiddrop:0.125") as trace:
        this.model(**video_prompt(this))
    assert [row.stage for row in trace.rows] == ["llm1", "llm2", "llm3"]
    counts = [row.tokens_out for row in trace.rows]
    n = trace.rows[0].tokens_in
    assert counts == [round(n / 2), round(n / 4), round(n / 8)]
    assert [row.tokens_in for row in trace.rows] == [n, *counts[:-1]]


def test_two_layers_are_one_cut_and_one_is_too_few() -> None:
    this = tiny("llava_onevision", layers=2)
    with attach(this.model, "pyramiddrop:0.125") as trace:
        this.model(**video_prompt(this))
    assert [(row.stage, row.tokens_out) for row in trace.rows] == [
        ("llm1", trace.reductions[0][2].m)
    ]
    with (
        pytest.raises(SpecError, match="has 1; use a model of at least 2 layers"),
        attach(tiny("llava_onevision", layers=1).model, "pyramiddrop:0.125"),
    ):
        pass


def test_a_planted_fault_fails() -> None:
    this = tiny("qwen3_vl")
    inputs = video_prompt(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, "pyramiddrop:0.2") as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(prompt, trace.reductions)
    site, number, second = trace.reductions[1]
    spare = next(i for i in range(second.n) if i not in second.keep.tolist())
    wrong = list(trace.reductions)
    wrong[1] = (site, number, Reduction.prune(torch.tensor([spare, *second.keep[1:]]), second.n))
    expected = oracle.masked(this, prompt, wrong)
    assert (logits[-1] - expected[keep[-1]]).abs().max() > 1e-3


def test_two_schedules_in_one_spec() -> None:
    this = tiny("llava_onevision")
    inputs = video_prompt(this)
    prompt = oracle.embed(this, inputs)
    with attach(this.model, "pyramiddrop:0.5+adaptinfer:0.5") as trace:
        logits = this.model(**inputs).logits[0]
    keep = oracle.kept_places(prompt, trace.reductions)
    expected = oracle.masked(this, prompt, trace.reductions)[keep]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    # Each counts from what entered it; at the end the smaller of the two remains.
    (item,) = prompt.items
    assert trace.reductions[-1][2].m < round(0.5 * len(item))
