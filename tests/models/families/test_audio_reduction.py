"""Reduction of audio tokens in stock models that hear: every method, against removal by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sound_models import AUDIO, CLASSES, Hearer, embedded, hearer, without

import mmfast
from mmfast.attach import attach
from mmfast.core.errors import ModelError
from mmfast.core.reduction import Reduction

FAMILIES = tuple(CLASSES)
families = pytest.mark.parametrize("family", FAMILIES)


def kept(inputs: dict[str, Any], sizes: list[int], reductions: list[Reduction]) -> torch.Tensor:
    """Places left of a batch of one."""
    places = (inputs["input_ids"][0] == AUDIO).nonzero()[:, 0].split(sizes)
    alive = inputs["input_ids"][0] != AUDIO
    for mine, reduction in zip(places, reductions, strict=True):
        alive[mine[reduction.keep]] = True
    return alive.nonzero()[:, 0]


def reduced(this: Hearer, inputs: dict[str, Any], spec: str) -> tuple[torch.Tensor, Any]:
    with attach(this.model, spec) as trace:
        return this.model(**inputs).logits, [r for _, _, r in trace.reductions]


@families
@pytest.mark.parametrize("spec", ["random:0.5", "divprune:3", "audio_prune:0.5", "evs:0.25"])
def test_pruning_equals_removal_by_hand(family: str, spec: str) -> None:
    this = hearer(family)
    inputs = this.inputs([[48, 29]])
    sizes = [this.tokens(48), this.tokens(29)]
    logits, reductions = reduced(this, inputs, spec)
    assert [r.n for r in reductions] == sizes
    keep = kept(inputs, sizes, reductions)
    assert len(keep) < inputs["input_ids"].shape[1]
    embeds = embedded(this, inputs)
    assert torch.equal(logits[0], without(this, embeds, keep))
    wrong = without(this, embeds, keep, contiguous=True)
    assert float((logits[0] - wrong).abs().max()) > 1e-2  # positions matter


@families
def test_merging_equals_merging_by_hand(family: str) -> None:
    this = hearer(family)
    inputs = this.inputs([[48]])
    logits, (reduction,) = reduced(this, inputs, "tome:0.5")
    embeds = embedded(this, inputs)
    places = (inputs["input_ids"][0] == AUDIO).nonzero()[:, 0]
    before = embeds[places].clone()
    for slot, source in enumerate(reduction.keep.tolist()):
        mine = reduction.owner == slot
        embeds[places[source]] = before[mine].mean(0)
    keep = kept(inputs, [this.tokens(48)], [reduction])
    assert reduction.m == round(reduction.n / 2)
    torch.testing.assert_close(logits[0], without(this, embeds, keep), atol=1e-5, rtol=0)


@families
def test_every_method_keeps_its_budget_and_all_at_one(family: str) -> None:
    """Whatever needs only what an ear can give: tokens, their line, the encoder's attention."""
    this = hearer(family)
    inputs = this.inputs([[48, 48], [48]])
    stock = this.model(**inputs).logits
    done = 0
    for method in mmfast.methods("reducer"):
        if (
            "pre" not in method.sites
            or method.sites[0] == "pixel"
            or not set(method.needs) <= {"x", "grid", "attn", "keys"}
        ):
            continue
        try:
            logits, reductions = reduced(this, inputs, f"{method.name}:0.5")
        except mmfast.core.errors.MmfastError as error:
            assert "\n" not in str(error)
            continue
        done += 1
        assert [r.m for r in reductions] == [round(r.n / 2) for r in reductions], method.name
        assert torch.isfinite(logits).all()
        logits, _ = reduced(this, inputs, f"{method.name}:1.0")
        assert torch.equal(logits, stock), method.name
    assert done >= 12, done


@families
@pytest.mark.parametrize("spec", ["random:0.5", "fastv@llm2:0.5", "visionzip:0.5"])
def test_a_batch_is_one_by_one_and_generation_follows(family: str, spec: str) -> None:
    """Seeds count items, so a batch's random choices differ; the others do not."""
    this = hearer(family)
    inputs = this.inputs([[48, 35], [48]])
    with attach(this.model, spec) as trace:
        out = this.model.generate(**inputs, max_new_tokens=5, do_sample=False)
    assert out.shape == (2, inputs["input_ids"].shape[1] + 5)
    sizes = [this.tokens(frames) for frames in (48, 35, 48)]
    assert [(r.n, r.m) for _, _, r in trace.reductions] == [(n, round(n / 2)) for n in sizes]
    if spec.startswith("random"):
        return
    alone = {
        key: value[-1:] if key.startswith("input_features") else value[1:, -_length(inputs, 1) :]
        for key, value in inputs.items()
    }
    with attach(this.model, spec):
        single = this.model.generate(**alone, max_new_tokens=5, do_sample=False)
    assert torch.equal(single[0, -5:], out[1, -5:])


@families
def test_beams_hear_the_sounds_of_their_prompt_in_order(family: str) -> None:
    this = hearer(family)
    inputs = this.inputs([[48, 35], [48]])
    how = {"max_new_tokens": 1, "do_sample": False, "output_logits": True}
    how |= {"return_dict_in_generate": True}
    with attach(this.model, "divprune:0.5"):
        alone = this.model.generate(**inputs, **how).logits[0]
        beams = this.model.generate(**inputs, num_beams=2, **how).logits[0]
    torch.testing.assert_close(beams[::2], alone, atol=1e-5, rtol=0)


def _length(inputs: dict[str, Any], row: int) -> int:
    return int(inputs["attention_mask"][row].sum())


@families
def test_greedy_tokens_equal_a_recompute_without_cache(family: str) -> None:
    this = hearer(family)
    inputs = this.inputs([[48, 29]])
    with attach(this.model, "divprune:0.5") as trace:
        out = this.model.generate(**inputs, max_new_tokens=6, do_sample=False)
    sizes = [this.tokens(48), this.tokens(29)]
    length = inputs["input_ids"].shape[1]
    embeds = torch.cat([embedded(this, inputs), this.model.get_input_embeddings()(out[0, length:])])
    keep = kept(inputs, sizes, [r for _, _, r in trace.reductions])
    whole = torch.cat([keep, torch.arange(length, len(embeds) - 1)])
    logits = without(this, embeds, whole)[len(keep) - 1 :]
    assert torch.equal(logits.argmax(-1), out[0, length:])


@families
def test_attention_of_the_ear_is_the_true_one(family: str) -> None:
    """audio_prune ranks by what eager attention of the encoder's last layer says."""
    this = hearer(family)
    inputs = this.inputs([[48]])
    _, (reduction,) = reduced(this, inputs, "audio_prune:3?coverage=0.0")
    tower = this.model.model.audio_tower
    this.model.set_attn_implementation("eager")
    try:
        call = {k: v for k, v in inputs.items() if k.startswith("input_features")}
        if not this.masked or family == "glmasr":
            call = {"input_features": call["input_features"]}
        weights = tower(**call, output_attentions=True).attentions[-1]
    finally:
        this.model.set_attn_implementation("sdpa")
    received = weights[0].mean(dim=(0, 1))  # [frames]
    tokens = received[: reduction.n * this.joined].view(-1, this.joined).mean(1)
    assert reduction.keep.tolist() == sorted(tokens.topk(3).indices.tolist())


def test_leaving_restores_the_model() -> None:
    this = hearer("voxtral")
    inputs = this.inputs([[48]])
    stock = this.model(**inputs).logits
    with attach(this.model, "random:0.3"):
        assert this.model(**inputs).logits.shape[1] < stock.shape[1]
    assert torch.equal(this.model(**inputs).logits, stock)


def test_pictures_are_refused_by_those_that_only_hear() -> None:
    from mmfast.models.families.adapter import check_media, families

    assert set(FAMILIES) <= set(families("audio"))
    with pytest.raises(ModelError, match="takes no image"):
        check_media(hearer("voxtral").model, "image")
