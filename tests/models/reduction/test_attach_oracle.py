"""Reduced passes against oracles without shared code (tests/support/models/model_oracle.py)."""

from __future__ import annotations

from typing import Any

import model_oracle as oracle
import pytest
import torch
from tiny_models import FAMILIES, Tiny, build, generate, tiny

from mmfast.attach import attach
from mmfast.core.reduction import Reduction

PRUNE = ("random:0.25", "divprune:9", "evs:0.5+divprune:0.5")
INSIDE = ("fastv@llm1:0.5", "random:0.5+fastv@llm1:0.5+fastv@llm3:3", "random@llm0:0.5")
MERGE = ("tome:0.25", "holitom:0.3", "tome:0.5+holitom_inner@llm2:0.5", "holitom_inner@llm1:0.3")

OTHERS = {  # shapes that no default covers
    "llava_onevision": {"layers": 5, "heads": 6, "kv_heads": 1, "width": 48, "image_size": 20},
    "qwen2_5_vl": {"layers": 5, "heads": 2, "kv_heads": 2, "patch": 3, "height": 30, "frames": 7},
    "qwen3_vl": {"layers": 6, "merge": 3, "depth": 4, "deepstack": 3, "height": 52},
}


def media(this: Tiny, kind: str) -> dict[str, Any]:
    return {
        "video": lambda: this.inputs(["on {video} what?"], videos=this.videos(1)),
        "image": lambda: this.inputs(["{image}?"], images=this.images(1)),
        "mixed": lambda: this.inputs(
            ["a {image} b {video} c {image}?"], images=this.images(2), videos=this.videos(1)
        ),
    }[kind]()


def reduced(this: Tiny, inputs: dict[str, Any], spec: str) -> tuple[torch.Tensor, Any]:
    with attach(this.model, spec) as trace:
        return this.model(**inputs).logits[0], trace


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", PRUNE)
def test_pruning_equals_removal_by_hand(family: str, attention: str, spec: str) -> None:
    this = tiny(family, attention)
    inputs = media(this, "video")
    prompt = oracle.embed(this, inputs)
    logits, trace = reduced(this, inputs, spec)
    keep = oracle.kept_places(prompt, trace.reductions)
    assert len(keep) < len(prompt.embeds)
    assert torch.equal(logits, oracle.removed(this, prompt, keep))
    wrong = oracle.removed(this, prompt, keep, contiguous=True)
    assert (logits - wrong).abs().max() > 1e-2


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["image", "mixed"])
@pytest.mark.parametrize("spec", ["random:0.25", "divprune:0.5"])
def test_images_and_mixed_prompts(family: str, kind: str, spec: str) -> None:
    this = tiny(family)
    inputs = media(this, kind)
    prompt = oracle.embed(this, inputs)
    logits, trace = reduced(this, inputs, spec)
    assert sorted({n for _, n, _ in trace.reductions}) == list(range(len(prompt.items)))
    keep = oracle.kept_places(prompt, trace.reductions)
    assert torch.equal(logits, oracle.removed(this, prompt, keep))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", INSIDE)
def test_inside_the_llm_equals_masking(family: str, attention: str, spec: str) -> None:
    this = tiny(family, attention)
    _equals_masking(this, media(this, "mixed"), spec)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", MERGE)
def test_merging_equals_merging_by_hand(family: str, spec: str) -> None:
    this = tiny(family)
    _equals_masking(this, media(this, "video"), spec)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("spec", [PRUNE[0], INSIDE[1], MERGE[2]])
def test_other_shapes(family: str, spec: str) -> None:
    this = tiny(family, **OTHERS[family])
    _equals_masking(this, media(this, "mixed"), spec)


def _equals_masking(this: Tiny, inputs: dict[str, Any], spec: str) -> None:
    prompt = oracle.embed(this, inputs)
    logits, trace = reduced(this, inputs, spec)
    keep = oracle.kept_places(prompt, trace.reductions)
    assert len(logits) == len(keep) < len(prompt.embeds)
    expected = oracle.masked(this, prompt, trace.reductions)[keep]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_fastv_reads_the_true_attention(family: str) -> None:
    """The kept tokens are the ones that eager attention of layer K-1 ranks first."""
    this = tiny(family)
    inputs = media(this, "video")
    prompt = oracle.embed(this, inputs)
    _, trace = reduced(this, inputs, "fastv@llm2:0.3")
    ((site, _, reduction),) = trace.reductions
    eager = build(family, attention="eager")
    attention = eager.model(**inputs, output_attentions=True).attentions[1]  # [1, H, L, L]
    score = attention[0, :, -1].mean(0)[prompt.items[0]]
    assert site == "llm2"
    assert reduction.keep.tolist() == sorted(score.topk(reduction.m).indices.tolist())


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", [PRUNE[0], *INSIDE[:2], MERGE[2]])
def test_greedy_tokens_equal_a_recompute_without_cache(
    family: str, attention: str, spec: str
) -> None:
    this = tiny(family, attention)
    inputs = media(this, "mixed")
    with attach(this.model, spec) as trace:
        out = generate(this, inputs, 16)
    length = inputs["input_ids"].shape[1]
    new = out.sequences[0, length:]
    prompt = oracle.embed(this, inputs)
    whole = oracle.append(this, prompt, new[:-1])
    logits = oracle.masked(this, whole, trace.reductions)[length - 1 :]
    torch.testing.assert_close(torch.cat(out.logits), logits, atol=1e-4, rtol=0)
    logits[:, this.blocked()] = -torch.inf
    assert torch.equal(logits.argmax(-1), new)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_faults_fail(family: str) -> None:
    """The oracle sees a wrong token, a shifted one, and a merge with a wrong owner."""
    this = tiny(family)
    inputs = media(this, "video")
    prompt = oracle.embed(this, inputs)
    for spec, change in (("random:0.25", _other), ("tome:0.25", _owner)):
        logits, trace = reduced(this, inputs, spec)
        ((site, number, reduction),) = trace.reductions
        wrong = [(site, number, change(reduction))]
        expected = oracle.masked(this, prompt, wrong)[oracle.kept_places(prompt, wrong)]
        assert (logits - expected).abs().max() > 1e-3


def _other(reduction: Reduction) -> Reduction:
    keep = reduction.keep.tolist()
    spare = next(i for i in range(reduction.n) if i not in keep)
    return Reduction.prune(torch.tensor([spare, *keep[1:]]), reduction.n)


def _owner(reduction: Reduction) -> Reduction:
    owner = reduction.owner.clone()
    loose = next(i for i in range(reduction.n) if i not in reduction.keep.tolist())
    owner[loose] = (owner[loose] + 1) % reduction.m
    return Reduction(reduction.keep, owner)
