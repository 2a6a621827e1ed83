"""Training under `attach` against prompts from which the same tokens were removed by hand."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ALL_FAMILIES, FAMILIES, Tiny
from torch import Tensor
from training_oracle import (
    IGNORE,
    assert_same,
    batch_of,
    gradients,
    hooks_inside,
    learner,
    removed_terms,
)
from transformers import DynamicCache, StaticCache

from mmfast.attach import attach
from mmfast.compressors import base
from mmfast.compressors.storm import Storm
from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE
from mmfast.models.reduction.training import CHECKPOINTING

TEXTS = ("on {x} what?", "{x} short", "a rather long one: {x} and more!")
SITES = ("random:0.4", "tome:0.4", "fastv@llm2:0.4", "divprune:0.6+fastv@llm2:0.5+random@llm3:0.5")
KINDS = [
    {"use_reentrant": True},
    {"use_reentrant": False},
]


@pytest.fixture(autouse=True)
def learning(inference: None) -> Iterator[None]:
    with torch.enable_grad():
        yield


@pytest.fixture(scope="module", params=FAMILIES)
def this(request: Any) -> Tiny:
    return learner(request.param)


def attached(this: Tiny, spec: str, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Loss and gradients under a reduction, and its trace."""
    with attach(this.model, spec) as trace:
        return gradients(this, lambda: this.model(**inputs).loss), trace


def check_by_hand(this: Tiny, spec: str, right: bool, texts: Any = TEXTS) -> None:
    inputs = batch_of(this, texts, right)
    found, trace = attached(this, spec, inputs)

    def by_hand() -> Tensor:
        total, count = removed_terms(this, texts, trace.reductions)
        return total / count

    assert_same(found, gradients(this, by_hand))


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("right", [False, True], ids=["left", "right"])
@pytest.mark.parametrize("spec", SITES)
def test_loss_and_gradients_equal_removal_by_hand(this: Tiny, spec: str, right: bool) -> None:
    check_by_hand(this, spec, right)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family_equals_removal_by_hand(family: str) -> None:
    this = learner(family)
    for spec in SITES:
        check_by_hand(this, spec, right=spec == SITES[2])


def test_text_beside_media_and_text_alone(this: Tiny) -> None:
    check_by_hand(this, "random:0.4", False, ("{x} what?", "no picture at all"))
    inputs = batch_of(this, ("only words",))
    stock = gradients(this, lambda: this.model(**inputs).loss)
    with pytest.warns(UserWarning, match="no image, video or sound"):
        found, _ = attached(this, "random:0.4", inputs)
    assert_same(found, stock, far=1e-15)


def test_a_share_of_one_is_the_stock_loss(this: Tiny) -> None:
    inputs = batch_of(this, TEXTS)
    stock = this.model(**inputs).loss
    assert torch.equal(attached(this, "random:1.0", inputs)[0][0], stock)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("spec", ["random:0.4", "fastv@llm2:0.4"])
def test_labels_come_in_every_form(this: Tiny, spec: str) -> None:
    """A number of items, shifted labels, a tuple; each as the plain loss is."""
    inputs = batch_of(this, TEXTS, right=True)
    with attach(this.model, spec) as trace, torch.no_grad():
        plain = this.model(**inputs).loss
        total, count = removed_terms(this, TEXTS, trace.reductions)
        by_number = this.model(**inputs, num_items_in_batch=torch.tensor(7)).loss
        shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=IGNORE)[:, 1:]
        by_shift = this.model(**inputs, shift_labels=shifted).loss
        as_tuple = this.model(**inputs, return_dict=False)[0]
    assert abs(float(plain - total / count)) < 1e-6
    assert abs(float(7 * by_number / total - 1)) < 1e-6
    assert torch.equal(by_shift, plain)
    assert torch.equal(as_tuple, plain)


def test_shifted_labels_alone_decide(this: Tiny) -> None:
    """The plain labels may say anything where shifted ones are given."""
    inputs = batch_of(this, TEXTS)
    shifted = torch.nn.functional.pad(inputs["labels"], (0, 1), value=IGNORE)[:, 1:]
    with attach(this.model, "random:0.4"), torch.no_grad():
        plain = this.model(**inputs).loss
        inputs["labels"] = torch.zeros_like(inputs["labels"])
        assert torch.equal(this.model(**inputs, shift_labels=shifted).loss, plain)


def test_a_loss_function_of_ones_own(this: Tiny) -> None:
    """Set before or inside, it gets what is left, and it is on the model afterwards."""
    seen: dict[str, Any] = {}

    def own(logits: Tensor, labels: Tensor, vocab_size: int, weights: Any, **_: Any) -> Tensor:
        seen.update(logits=logits, labels=labels, weights=weights)
        return logits.sum()

    inputs = batch_of(this, TEXTS)
    weights = torch.arange(inputs["labels"].numel()).view_as(inputs["labels"])
    for early in (True, False):
        if early:
            this.model.loss_function = own
        with attach(this.model, "random:0.4"), torch.no_grad():
            if not early:
                this.model.loss_function = own
            this.model(**inputs, weights=weights)
        assert this.model.loss_function is own
        del this.model.__dict__["_loss_function"]
        assert seen["labels"].shape == seen["weights"].shape == seen["logits"].shape[:2]
        there = seen["labels"] != IGNORE
        assert torch.equal(
            inputs["labels"].flatten()[seen["weights"][there]], seen["labels"][there]
        )


def test_nothing_is_left_behind(this: Tiny) -> None:
    inputs = batch_of(this, TEXTS)
    before = dict(this.model.__dict__)
    attached(this, "random:0.4", inputs)
    assert dict(this.model.__dict__) == before
    with pytest.raises(ValueError, match="batch_size"), attach(this.model, "random:0.4"):
        this.model.loss_function(
            torch.zeros(1, 3, 9), labels=torch.zeros(1, 5).long(), vocab_size=9
        )


@pytest.mark.parametrize(
    "spec",
    ["random:0.4", "tome:0.4", "visionzip:0.4", "tome@vit:0.5", "fastv@llm2:0.5", "gemfilter:0.4"],
)
def test_gradients_are_those_of_the_loss(spec: str) -> None:
    """The derivative along a random direction, by differences; what is kept does not change."""
    this = learner("llava_onevision")
    this.model.loss_function = in_double
    inputs = batch_of(this, TEXTS[:2])
    generator = torch.Generator().manual_seed(0)
    way = {
        name: torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, p in this.model.named_parameters()
    }
    (_, grads), _ = attached(this, spec, inputs)
    slope = sum(float((grads[name] * way[name]).sum()) for name in grads)

    def at(step: float) -> float:
        with torch.no_grad(), attach(this.model, spec):
            for name, p in this.model.named_parameters():
                p.add_(way[name], alpha=step)
            value = float(this.model(**inputs).loss)
            for name, p in this.model.named_parameters():
                p.sub_(way[name], alpha=step)
        return value

    by_steps = (at(1e-4) - at(-1e-4)) / 2e-4  # norms are float32 in any case
    assert abs(slope - by_steps) < 2e-3 * max(1, abs(slope))


def in_double(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


CHECKPOINTED = ("random:0.4", "tome:0.4", "visionzip:0.4", "fastv@llm2:0.4", SITES[3])


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("spec", CHECKPOINTED)
def test_gradient_checkpointing_changes_nothing(this: Tiny, spec: str, kind: Any) -> None:
    check_checkpointing(this, spec, kind)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_gradient_checkpointing_of_every_family(family: str) -> None:
    this = learner(family)
    for kind in KINDS:
        for spec in (SITES[0], SITES[3]):
            check_checkpointing(this, spec, kind)


def check_checkpointing(this: Tiny, spec: str, kind: dict[str, bool]) -> None:
    inputs = batch_of(this, TEXTS)
    plain, _ = attached(this, spec, inputs)
    getattr(this.model, f"{CHECKPOINTING}_enable")(kind)
    this.model.enable_input_require_grads()
    try:
        assert_same(attached(this, spec, inputs)[0], plain)
        two = gradients_of_two(this, spec, inputs)
    finally:
        this.model.disable_input_require_grads()
        getattr(this.model, f"{CHECKPOINTING}_disable")()
    twice = (2 * plain[0], {name: 2 * grad for name, grad in plain[1].items()})
    assert_same(two, twice)


def gradients_of_two(this: Tiny, spec: str, inputs: dict[str, Any]) -> Any:
    """Two forward passes, another one between, then one backward pass."""
    with attach(this.model, spec):

        def both() -> Tensor:
            losses = [this.model(**inputs).loss for _ in range(2)]
            this.model.eval()
            with torch.no_grad():
                this.model(**batch_of(this, ("{x}?",)))
            this.model.train()
            return losses[0] + losses[1]

        return gradients(this, both)


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("kind", KINDS, ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("spec", ["tome:0.4", "fastv@llm2:0.4", SITES[3]])
def test_hooks_that_run_again_repeat_what_they_did(spec: str, kind: Any) -> None:
    this = learner("qwen2_5_vl")
    inputs = batch_of(this, TEXTS)
    inputs["use_cache"] = False  # a layer that runs again would store twice
    plain, _ = attached(this, spec, inputs)
    hooks_inside(this.model.get_decoder().layers, **kind)
    this.model.enable_input_require_grads()
    assert_same(attached(this, spec, inputs)[0], plain)
    assert_same(
        gradients_of_two(this, spec, inputs),
        (2 * plain[0], {n: 2 * g for n, g in plain[1].items()}),
    )


def test_the_trace_of_a_model_in_training_stays_bounded(this: Tiny) -> None:
    inputs = batch_of(this, TEXTS)
    with attach(this.model, "random:0.4+fastv@llm2:0.5") as trace:
        counts = []
        for _ in range(3):
            this.model(**inputs).loss.backward()
            counts.append((len(trace.rows), len(trace.reductions)))
    assert counts == [(2, 6)] * 3


@pytest.mark.parametrize("how", ["checkpointing", "no cache"])
def test_a_cache_policy_without_a_cache_says_so(this: Tiny, how: str) -> None:
    inputs = batch_of(this, TEXTS)
    with attach(this.model, cache="snapkv:2") as trace:
        this.model(**inputs)
    assert not trace.notes
    given = {}
    if how == "checkpointing":
        getattr(this.model, f"{CHECKPOINTING}_enable")(KINDS[1])
    else:
        given = {"use_cache": False}
    try:
        with (
            pytest.warns(UserWarning, match=r"cache snapkv:2 did nothing: this call keeps no keys"),
            attach(this.model, cache="snapkv:2") as trace,
        ):
            for _ in range(2):
                this.model(**inputs, **given)
    finally:
        if how == "checkpointing":
            getattr(this.model, f"{CHECKPOINTING}_disable")()
    assert len(trace.notes) == 1


@pytest.fixture
def again() -> Iterator[Tiny]:
    """A model that checkpoints its layers."""
    this = learner("llava_onevision")
    getattr(this.model, f"{CHECKPOINTING}_enable")(KINDS[1])
    yield this
    getattr(this.model, f"{CHECKPOINTING}_disable")()


ACTING = (
    {"cache": "snapkv:2"},
    {"reduce": "random:0.4"},
    {"reduce": "fastv@llm2:0.4", "cache": "sink:2+window:8"},
)


@pytest.mark.skipif(CACHE == "past_key_values", reason="generate of 5.23 loses its cache there")
@pytest.mark.parametrize("spec", ACTING, ids=str)
def test_a_checkpointed_model_in_training_generates_as_in_evaluation(
    again: Tiny, spec: dict[str, str]
) -> None:
    """`generate` has no gradients, so no layer runs again and each one stores what it computes."""
    inputs = batch_of(again, TEXTS[:2])
    del inputs["labels"]
    found = []
    for learns in (False, True):
        again.model.train(learns)
        with attach(again.model, **spec) as trace:
            found.append(again.model.generate(**inputs, max_new_tokens=5, do_sample=False))
        assert not trace.notes
    assert torch.equal(*found)


@pytest.mark.parametrize("spec", ACTING, ids=str)
def test_a_cache_that_checkpointing_cannot_fill_is_refused(
    again: Tiny, spec: dict[str, str]
) -> None:
    config = again.model.config
    inputs = batch_of(again, TEXTS[:1])
    filled = DynamicCache(config=config)
    with torch.no_grad():
        again.model.eval()(**inputs, **{CACHE: filled})
    again.model.train()
    names = rf"stores no keys.* Dynamic.* of \d+ tokens; .* model.{CHECKPOINTING}_disable"
    with attach(again.model, **spec), pytest.raises(ModelError, match=names):
        again.model(input_ids=inputs["input_ids"][:, :1], **{CACHE: filled})
    static = StaticCache(config=config, max_cache_len=64)
    with attach(again.model, **spec), pytest.raises(ModelError, match="StaticCache of 0 tokens"):
        again.model(**inputs, **{CACHE: static})


def test_a_compressor_tells_that_the_tower_learns_nothing_through_it(tmp_path: Path) -> None:
    """Its vectors have no gradients, in a checkpointed pass and in any other."""
    this = learner("llava")
    inputs, path = batch_of(this, TEXTS), tmp_path / "weights.safetensors"
    base.save(Storm(32, 1, (6, 6), inner=8), path)
    inner, text = this.model.model, this.model.model.language_model
    own = {id(each) for each in text.parameters()}
    rest = [each for each in inner.parameters() if id(each) not in own]
    for checkpointing in (False, True):
        getattr(this.model, f"{CHECKPOINTING}_{'enable' if checkpointing else 'disable'}")()
        with attach(this.model, f"storm:1?path={path}") as trace:
            with pytest.warns(UserWarning, match=r"storm .* the vision tower .* learn nothing"):
                gradients(this, lambda: this.model(**inputs).loss)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                gradients(this, lambda: this.model(**inputs).loss)  # once
        assert sum("without gradients" in note for note in trace.notes) == 1
        with attach(this.model, f"storm:1?path={path}") as trace:
            for each in rest:
                each.requires_grad_(False)
            gradients(this, lambda: this.model(**inputs).loss)
            for each in rest:
                each.requires_grad_(True)
        assert not trace.notes
    this.model.eval()
    with attach(this.model, f"storm:1?path={path}") as trace:
        this.model(**inputs)
    assert not trace.notes
