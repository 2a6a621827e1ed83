"""Gated units whose activation and gate are inside the products of oneDNN."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

from mmfast.models.decoder.lean import LeanDecoder
from mmfast.models.gated import fuse, gated
from mmfast.models.packing import PackedLinear, WeightPlan, pack_weights, packed
from mmfast.ops.weight_forms import has_onednn

onednn = pytest.mark.skipif(not has_onednn(), reason="oneDNN multiplies no bfloat16 here")
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}


def text_model(kind: str = "silu") -> Any:
    torch.manual_seed(0)
    if kind == "silu":
        return Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval().bfloat16()
    return GemmaForCausalLM(GemmaConfig(**SIZES, hidden_act=kind)).eval().bfloat16()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def units(model: Any) -> list[Any]:
    return [each for each in model.modules() if type(each).forward is gated]


@onednn
@torch.no_grad()
@pytest.mark.parametrize("kind", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 70), (3, 50)])
@pytest.mark.parametrize("bias", [False, True])
def test_closer_to_exact_numbers_than_stock_units(kind: str, shape: Any, bias: bool) -> None:
    model, x = text_model(kind), drawn(*shape, SIZES["hidden_size"])
    unit = model.model.layers[1].mlp
    for layer in (unit.gate_proj, unit.up_proj, unit.down_proj) if bias else ():
        layer.bias = torch.nn.Parameter(drawn(layer.out_features))
    exact, stock = copy.deepcopy(unit).double()(x.double()), unit(x)
    with packed(model, "bfloat16"):
        assert len(units(model)) == 2
        found = unit(x)
    assert found.shape == x.shape and found.dtype == x.dtype and not units(model)
    error, usual = ((each - exact).norm() for each in (found, stock))
    assert error < 1.05 * usual and not torch.equal(found, stock)
    assert torch.equal(unit(x), stock)


@onednn
@torch.no_grad()
def test_who_looks_inside_sees_every_number() -> None:
    """Hooks, and forwards that were replaced, get what stock units give them."""
    model, x, seen = text_model(), drawn(1, 40, 64), []
    pack_weights(model, "bfloat16")
    unit = model.model.layers[0].mlp
    found = unit(x)
    for part in (unit.gate_proj, unit.up_proj, unit.act_fn):
        handle = part.register_forward_hook(lambda *_: seen.append(1))
        written = unit.down_proj(unit.act_fn(unit.gate_proj(x)) * unit.up_proj(x))
        seen.clear()
        assert torch.equal(unit(x), written) and len(seen) == 1
        handle.remove()
    unit.act_fn.forward = torch.zeros_like
    assert not unit(x).any()
    del unit.act_fn.forward
    assert torch.equal(unit(x), found)


@onednn
@torch.no_grad()
def test_copies_are_units_of_their_own() -> None:
    model, x = text_model(), drawn(1, 40, 64)
    pack_weights(model, "bfloat16")
    twin = copy.deepcopy(model)
    expected = model.model.layers[0].mlp(x)
    model.model.layers[0].mlp.act_fn.forward = torch.zeros_like
    assert len(units(twin)) == 2 and torch.equal(twin.model.layers[0].mlp(x), expected)
    assert isinstance(twin.model.layers[0].mlp, Qwen2MLP)


@onednn
@torch.no_grad()
def test_a_module_that_does_more_with_the_same_parts_stays_as_it_is() -> None:
    class Clipped(Qwen2MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = self.act_fn(self.gate_proj(x)).clamp_max(0.1)
            found: torch.Tensor = self.down_proj(inner * self.up_proj(x))
            return found

    model, x = text_model(), drawn(1, 40, 64)
    unit = model.model.layers[1].mlp
    unit.__class__ = Clipped
    pack_weights(model, "bfloat16")
    assert units(model) == [model.model.layers[0].mlp]
    inner = unit.act_fn(unit.gate_proj(x)).clamp_max(0.1)
    assert torch.equal(unit(x), unit.down_proj(inner * unit.up_proj(x)))


@onednn
def test_a_module_whose_forward_asks_for_more_stays_as_it_is() -> None:
    class Routed(Qwen2MLP):
        def forward(self, x: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = super().forward(x) * share
            return found

    model = text_model()
    model.model.layers[1].mlp.__class__ = Routed
    pack_weights(model, "bfloat16")
    assert units(model) == [model.model.layers[0].mlp]


@torch.no_grad()
@pytest.mark.parametrize("plan", [WeightPlan("int8", "int8"), WeightPlan("int8", "bfloat16")])
def test_few_rows_in_another_form_are_as_ever(plan: WeightPlan) -> None:
    model, x = text_model(), drawn(1, 4, 64)
    pack_weights(model, plan)
    assert bool(units(model)) == (has_onednn() and plan.many == "bfloat16")
    unit = model.model.layers[0].mlp
    assert torch.equal(unit(x), unit.down_proj(unit.act_fn(unit.gate_proj(x)) * unit.up_proj(x)))


def test_without_onednn_all_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmfast.ops.weight_forms.has_onednn", lambda: False)
    monkeypatch.setattr("mmfast.models.gated.has_onednn", lambda: False)
    model = text_model()
    pack_weights(model, "bfloat16")
    assert not units(model) and not fuse(model)
    layer: PackedLinear = model.model.layers[0].mlp.gate_proj
    assert layer._joint is not None  # one product of both gains where nothing is fused


@onednn
@torch.inference_mode()
def test_a_lean_decoder_runs_the_same_units() -> None:
    model, x = text_model(), drawn(1, 40, 64)
    pack_weights(model, "bfloat16")
    lean, layer = LeanDecoder(model.model), model.model.layers[0]
    assert lean.free
    normed = layer.post_attention_layernorm(x)
    turns = model.model.rotary_emb(x, torch.arange(40)[None])
    nothing = torch.zeros(1, 40, 4, 16, dtype=torch.bfloat16)
    found = lean._layer(lambda *_: nothing, 0, x, tuple(each[:, None] for each in turns))
    assert torch.equal(found, x + layer.mlp(normed)) and units(model)
