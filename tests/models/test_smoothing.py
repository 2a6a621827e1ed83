"""Smoothed models compute what they did, and their rounded weights err less."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mmfast.core.errors import ModelError
from mmfast.models.packing import pack_weights
from mmfast.models.smoothing import smooth

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BATCH = {"input_ids": torch.arange(40)[None] % 90}


def spiky(kind: str = "llama") -> Any:
    """A model with three channels of large activations behind every norm, as large models have."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for layer in model.model.layers:
        for name, reader in (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp")):
            getattr(layer, name).weight[[3, 17, 40]] += 40.0
            for each in getattr(layer, reader).children():
                if getattr(each, "in_features", 0) == 64 and each.weight.shape[0] != 64:
                    each.weight.mul_(2.0)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(**BATCH).logits
    return found


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma"])
def test_the_same_function_and_less_error_on_four_bits(kind: str) -> None:
    model = spiky(kind)
    exact, plain = logits(model), copy.deepcopy(model)
    found = smooth(model, BATCH, alphas=(0.3, 0.6))
    assert found.alpha in (0.3, 0.6) and found.places == 6
    assert error(logits(model), exact) < 1e-4
    errors = []
    for each in (plain, model):
        head = each.lm_head
        pack_weights(each, "int4")
        each.lm_head = head  # of int8, and not smoothed
        errors.append(error(logits(each), exact))
    assert errors[1] < 0.8 * errors[0]
    assert errors == pytest.approx([found.plain, found.error], rel=0.1)


def test_scales_are_those_of_the_paper() -> None:
    model = spiky()
    before, seen = copy.deepcopy(model), list[np.ndarray]()
    layer = before.model.layers[1]
    hook = layer.mlp.up_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0][0].numpy()))
    logits(before)
    hook.remove()
    smooth(model, [BATCH], alphas=(0.7,))
    mine = model.model.layers[1]
    names = ("gate_proj", "up_proj")
    columns = np.abs(np.concatenate([getattr(layer.mlp, n).weight.numpy() for n in names]))
    want = np.abs(seen[0]).max(0) ** 0.7 / columns.max(0) ** 0.3
    was, now = (x.post_attention_layernorm.weight.numpy() for x in (layer, mine))
    np.testing.assert_allclose(was / now, want, rtol=1e-4)
    was, now = (x.mlp.gate_proj.weight.numpy() for x in (layer, mine))
    np.testing.assert_allclose(now / was, np.broadcast_to(want, was.shape), rtol=1e-4)


def test_a_norm_that_something_else_reads_is_left_alone() -> None:
    model = spiky()
    norm = model.model.layers[0].input_layernorm
    attention, kept = model.model.layers[0].self_attn, norm.weight.clone()
    plain = attention.forward

    def beside(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        out, *rest = plain(hidden_states, *args, **kwargs)
        return out + hidden_states, *rest

    attention.forward = beside
    exact = logits(model)
    found = smooth(model, BATCH, alphas=(0.5,))
    assert found.places == 5 and torch.equal(norm.weight, kept)
    assert error(logits(model), exact) < 1e-4


def test_what_does_not_help_changes_nothing() -> None:
    model = spiky()
    before = copy.deepcopy(model.state_dict())
    found = smooth(model, BATCH, form="float16", alphas=(5.0,))
    assert found.alpha is None and found.error == found.plain
    assert all(torch.equal(before[name], each) for name, each in model.state_dict().items())


def test_an_exponent_that_leaves_the_range_of_numbers_is_not_chosen() -> None:
    model = spiky()
    exact = logits(model)
    assert smooth(model, BATCH, alphas=(100.0, 0.5)).alpha == 0.5  # 100 makes NaN
    assert error(logits(model), exact) < 1e-4


def test_refusals_are_one_line() -> None:
    model = spiky()
    for change, words in (
        ({"form": "int3"}, "int4"),
        ({"inputs": []}, "at least one"),
        ({"alphas": ()}, "at least one"),
    ):
        with pytest.raises(ModelError, match=words) as caught:
            smooth(model, **{"inputs": BATCH, **change})
        assert "\n" not in str(caught.value)
    pack_weights(model, "int8")
    with pytest.raises(ModelError, match="packed already"):
        smooth(model, BATCH)
