"""Prefill with parts that were read before: identity, positions, DeepStack, planted faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import FAMILIES, generate, tiny
from torch import Tensor

from mmfast.core.errors import ModelError
from mmfast.models.cache_name import CACHE
from mmfast.models.reduction.inputs import compressed, prompt_rows
from mmfast.streams.reuse.media import MediaReuse
from mmfast.streams.reuse.plan import ReusePlan, parse_reuse
from mmfast.streams.reuse.prefill import LOOK, ReusePrefill, SeenPart, narrowing
from mmfast.streams.reuse.store import ReuseStore


def _reuse(family: str, spec: str, store: ReuseStore | None = None, **kwargs: Any) -> Any:
    this = tiny(family, **kwargs)
    plan = parse_reuse(spec)
    assert plan is not None
    return this, MediaReuse(this.model, this.processor, plan, store or ReuseStore())


def _album(this: Any, order: tuple[int, ...], text: str = "see", seed: int = 0) -> Any:
    pictures = this.images(3, seed)
    prompt = " ".join([text, *(f"{i} {{image}}" for i in order), "which?"])
    return this.inputs([prompt], images=[pictures[i] for i in order])


def _logits(this: Any, inputs: Any, tokens: int = 4) -> tuple[Tensor, Tensor]:
    found = generate(this, inputs, tokens)
    return torch.stack(found.logits), found.sequences[:, -tokens:]


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=3)
@given(
    order=st.permutations([0, 1, 2]),
    start=st.sampled_from(["", "look here, now", "a much longer line of text before it"]),
    seed=st.integers(0, 3),
)
def test_all_tokens_recomputed_is_a_full_prefill(
    family: str, order: list[int], start: str, seed: int
) -> None:
    this, reuse = _reuse(family, "blend:1.0")
    reuse.prompt(reuse.encoded(_album(this, (0, 1, 2), seed=seed)))  # now all are known
    inputs = _album(this, tuple(order), start, seed)
    hits = reuse.store.hits
    logits, tokens = _logits(this, reuse.prompt(reuse.encoded(inputs)))
    stock, expected = _logits(this, inputs)
    assert reuse.store.hits > hits + 3  # the pictures were taken from the store
    assert torch.allclose(logits, stock, atol=1e-5, rtol=0)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_is_reused_bit_for_bit(family: str) -> None:
    this, reuse = _reuse(family, "prefix")
    one, two = (
        this.inputs([f"see {{image}} {text}"], images=this.images(1)) for text in ("what", "who is")
    )
    first = reuse.prompt(reuse.encoded(one))[CACHE]
    second = reuse.prompt(reuse.encoded(two))[CACHE]
    stock = generate(this, two, 1).past_key_values
    place = one["input_ids"][0] == this.model.config.image_token_id
    shared = int(place.nonzero()[-1]) + 1  # up to the end of the picture
    for a, b, c in zip(first.layers, second.layers, stock.layers, strict=True):
        assert torch.equal(a.keys[:, :, :shared], b.keys[:, :, :shared])
        assert torch.equal(a.values[:, :, :shared], b.values[:, :, :shared])
        assert torch.allclose(b.keys, c.keys[:, :, : b.keys.shape[2]], atol=1e-5)
    again = reuse.prompt(reuse.encoded(two))
    assert torch.equal(_logits(this, again)[1], _logits(this, two)[1])


def _moved(family: str, share: float, mode: str = "blend", **kwargs: Any) -> tuple[Any, ...]:
    """Keys and values with pictures from elsewhere, and those of a full prefill."""
    this, reuse = _reuse(family, f"{mode}:{share}", **kwargs)
    reuse.prompt(reuse.encoded(_album(this, (0, 1, 2))))
    inputs = reuse.encoded(_album(this, (2, 0, 1), "other words before"))
    rest, sequences = compressed(this.model, inputs, ())
    rows = prompt_rows(this.model, rest, inputs["mm_encoder_outputs"])
    found, _ = reuse.read(rows, rest["input_ids"][0], sequences)
    whole = ReusePrefill(this.model).run(rows, stop=len(rows.hidden) - 1)
    return found, whole, rows, sequences, reuse


@pytest.mark.rest_is_slow(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["blend", "craft"])
def test_share_recomputed(family: str, mode: str) -> None:
    found, whole, rows, *_ = _moved(family, 0.25, mode)
    visual = int(rows.visual.sum())
    text = len(rows.hidden) - 1 - visual
    assert text < found.computed <= text + -(-visual // 4)
    # The first layer knows no context, and the layer of the choice is read for all of `blend`.
    deep = 2 if mode == "blend" else 1
    for layer in range(deep):
        assert torch.allclose(found.layers[layer][0], whole.layers[layer][0], atol=1e-4)
    assert not torch.allclose(found.layers[-1], whole.layers[-1], atol=1e-3)
    assert not found.raw  # nothing near the truth is stored as the truth


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_stand_at_their_new_positions(family: str) -> None:
    """Layer 0 depends on token and position alone, so keys from elsewhere are those of here."""
    found, whole, rows, _, _ = _moved(family, 0.0, "craft")
    assert torch.allclose(found.layers[0], whole.layers[0], atol=1e-5)
    shifted = ReusePrefill(tiny(family).model).run(
        replace(rows, positions=rows.positions + 3), stop=len(rows.hidden) - 1
    )
    assert not torch.allclose(found.layers[0][0], shifted.layers[0][0], atol=1e-3)  # the control


def test_more_tokens_recomputed_are_nearer() -> None:
    gaps = []
    for share in (0.0, 0.3, 0.7, 1.0):
        found, whole, *_ = _moved("llava_onevision", share)
        gaps.append(float((found.layers[-1] - whole.layers[-1]).norm()))
    assert gaps[0] > gaps[1] > gaps[2] > gaps[3]
    assert gaps[3] < 1e-4


@pytest.mark.parametrize("last", [0, 1, 2, 4, 23])
def test_share_is_the_mean_of_the_layers_behind_the_look(last: int) -> None:
    for share in (0.0, 0.1, 0.15, 0.5, 0.8, 1.0):
        chosen, runs, now = narrowing(last, share), list[float](), 1.0
        for layer in range(last + 1):
            assert chosen.get(layer, now) <= now  # who was left out stays out
            now = chosen.get(layer, now)
            runs.append(now)
        deep = runs[LOOK:] or runs
        assert sum(deep) / len(deep) == pytest.approx(share)
        assert all(0.0 <= each <= 1.0 for each in runs)


def test_those_that_deviate_most_are_chosen() -> None:
    """A token whose stored values are planted far off is read again, all others are not."""
    this = tiny("llava_onevision")
    inputs = MediaReuse(this.model, this.processor, ReusePlan("prefix"), ReuseStore()).encoded(
        _album(this, (0,))
    )
    rest, _ = compressed(this.model, inputs, ())
    rows = prompt_rows(this.model, rest, inputs["mm_encoder_outputs"])
    prefill = ReusePrefill(this.model)
    whole = prefill.run(rows)
    at = rows.visual.nonzero()[:, 0]
    start, stop = int(at[0]), int(at[-1]) + 1
    block = whole.part(start, stop, rows.positions)
    values = [value.clone() for value in block.values]
    values[1][:, 5] += 10.0
    for value in values[2:]:
        value[:, 5] += 10.0  # where it is not read again, it stays wrong
    wrong = replace(block, values=tuple(values))
    share = 1 / (stop - start)
    found = prefill.run(rows, [SeenPart(start, wrong, False)], ReusePlan("blend", share))
    assert torch.allclose(found.layers[-1], whole.layers[-1], atol=1e-4)
    blind = prefill.run(rows, [SeenPart(start, wrong, False)], ReusePlan("blend", 0.0))
    assert not torch.allclose(blind.layers[-1], whole.layers[-1], atol=1e-1)


def test_eager_attention_agrees_with_sdpa() -> None:
    one = _moved("llava_onevision", 0.3)[0]
    other = _moved("llava_onevision", 0.3, attention="eager")[0]
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_models_that_cannot_are_refused() -> None:
    with pytest.raises(ModelError, match="layers of kind"):
        ReusePrefill(tiny("gemma3").model)
    model = tiny("llava_onevision").model
    name = model.get_decoder().config._attn_implementation
    try:
        model.get_decoder().config._attn_implementation = "flash_attention_2"
        with pytest.raises(ModelError, match="reuse='encoder'"):
            ReusePrefill(model)
    finally:
        model.get_decoder().config._attn_implementation = name


def test_nothing_is_left_on_the_model() -> None:
    this, reuse = _reuse("llava_onevision", "blend:0.2")
    reuse.prompt(reuse.encoded(_album(this, (0, 1))))
    reuse.prompt(reuse.encoded(_album(this, (1, 0))))
    assert all("forward" not in layer.__dict__ for layer in this.model.get_decoder().layers)
