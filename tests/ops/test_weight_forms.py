"""Packed weights against products in float64 with weights rounded by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mmfast.core.errors import ModelError
from mmfast.ops import weight_forms
from mmfast.ops.weight_forms import (
    FEW,
    FORMS,
    GROUP,
    WIDE,
    Int4Weights,
    Int8Weights,
    has_fbgemm,
    has_onednn,
    pack,
    pack_joint,
)

# Largest relative error of a product with its own weights, and with those it was made of.
KERNEL = {"bfloat16": 6e-3, "float16": 1e-5, "int8": 6e-3, "int8-dynamic": 0.03, "int4": 6e-3}
ROUNDING = {"bfloat16": 4e-3, "float16": 4e-4, "int8": 0.012, "int8-dynamic": 0.012, "int4": 0.12}


def _drawn(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(outputs, inputs, generator=noise) * inputs**-0.5


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _by_hand(weight: Tensor, levels: int) -> np.ndarray[Any, Any]:
    """Round each row of numbers to multiples of its largest one by `levels`."""
    rows = []
    for row in weight.numpy().astype(np.float64):
        step = np.abs(row).max() / levels or 1.0
        rows.append([step * round(value / step) for value in row])
    return np.array(rows)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 2, FEW, FEW + 1, 40])
@pytest.mark.parametrize("outputs", [64, WIDE])
def test_products_are_those_of_the_rounded_weights(name: str, rows: int, outputs: int) -> None:
    weight, x = _drawn(outputs, 96), _drawn(rows, 96, seed=1)
    form = pack(name, weight)
    found, own = form.product(x), form.weight().double()
    assert found.shape == (rows, outputs) and found.dtype == x.dtype
    assert _error(found, x.double() @ own.t()) < KERNEL[name]
    assert _error(form.weight(), weight.double()) < ROUNDING[name]
    assert _error(form.product(x.bfloat16()), x.double() @ own.t()) < KERNEL[name] + 6e-3


def test_int8_weights_are_the_nearest_steps() -> None:
    weight = _drawn(12, 32)
    weight[3] = 0.0
    np.testing.assert_allclose(pack("int8", weight).weight(), _by_hand(weight, 127), atol=1e-6)


def test_int4_weights_are_within_half_a_step_of_their_group() -> None:
    weight = _drawn(64, 64)
    weight[5] = 0.25
    found = pack("int4", weight).weight().reshape(64, -1, GROUP)
    groups = weight.reshape(64, -1, GROUP)
    steps = (groups.amax(-1) - groups.amin(-1)) / 15
    far = (found - groups).abs().amax(-1)
    # A bfloat16 middle is off by 2**-9 of itself, a step by as much over seven steps and a half.
    assert bool((far <= 0.55 * steps + 2**-8 * groups.abs().amax(-1)).all())


@pytest.mark.parametrize("rows", [1, 3])
def test_int8_activations_are_not_rounded_where_layers_are_wide(rows: int) -> None:
    """The second part carries what the first rounds away: without it the error is 40 times that."""
    weight, x = _drawn(WIDE, 128), _drawn(rows, 128, seed=1)
    form = pack("int8", weight)
    exact = x.double() @ form.weight().double().t()
    whole = _error(form.product(x), exact)
    once = _error(pack("int8-dynamic", weight).product(x), exact)
    assert whole < 5e-4 < 5e-3 < once


@pytest.mark.parametrize("name", FORMS)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    form = pack(name, _drawn(WIDE, 64))
    x = _drawn(4, 64, seed=1)
    other = x.clone()
    other[1:] *= 100
    assert torch.equal(form.product(x)[0], form.product(other)[0])
    torch.testing.assert_close(form.product(x[:1]), form.product(x)[:1], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 3, FEW + 1])
def test_zeros_stay_zeros(name: str, rows: int) -> None:
    x = torch.zeros(rows, 64)
    assert not pack(name, _drawn(WIDE, 64)).product(x).any()
    assert not pack(name, torch.zeros(64, 64)).product(x + 1).any()


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(FORMS)),
    st.integers(1, 70),
    st.integers(1, 90),
    st.integers(1, 20),
    st.floats(1e-3, 1e3),
)
def test_any_shape_and_scale(name: str, outputs: int, inputs: int, rows: int, size: float) -> None:
    weight, x = _drawn(outputs, inputs), size * _drawn(rows, inputs, seed=1)
    form = pack(name, weight)
    exact = x.double() @ form.weight().double().t()
    far = (form.product(x).double() - exact).norm()
    # Against what cannot cancel: a product of few numbers may be small by chance.
    assert far <= 0.03 * x.double().norm() * form.weight().double().norm()


@pytest.mark.parametrize("outputs", [64, WIDE])
def test_int4_of_many_rows_multiplies_the_weights_of_few(outputs: int) -> None:
    """Transposed and rounded to bfloat16 once, each is the number that `weight` returns."""
    form = pack("int4", _drawn(outputs, 96))
    rows = torch.eye(96, dtype=torch.bfloat16)
    assert torch.equal(form.product(rows).t(), form.weight().bfloat16())


@pytest.mark.parametrize("rows", [1, FEW, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_int8_are_held_once(rows: int, dtype: torch.dtype) -> None:
    weight, x = _drawn(WIDE, 64).to(dtype), _drawn(rows, 64, seed=1).to(dtype)
    form, layer = pack("int8", weight, head=True), pack("int8", weight)
    assert form.nbytes / weight.numel() == pytest.approx(1, abs=0.1)
    torch.testing.assert_close(form.weight(), layer.weight(), rtol=1e-6, atol=0)
    exact = x.double() @ form.weight().double().t()
    assert _error(form.product(x), exact) < (5e-4 if dtype is torch.float32 else 3e-3)


@pytest.mark.parametrize("name", FORMS)
def test_joint_weights_are_one_below_the_other(name: str) -> None:
    parts = [_drawn(64, 96, seed=n) for n in range(3)]
    whole = pack_joint(name, parts)
    assert whole is not None
    each = [pack(name, part) for part in parts]
    assert torch.equal(whole.weight(), torch.cat([form.weight() for form in each]))


def test_weights_of_different_kernels_are_not_joined() -> None:
    assert pack_joint("int4", [_drawn(64, 64), _drawn(32, 64)]) is None  # int8 has the second
    assert pack_joint("int8", [_drawn(64, 64), _drawn(60, 64)]) is None  # no whole blocks
    if has_fbgemm():
        assert pack_joint("int8", [_drawn(WIDE, 64), _drawn(64, 64)]) is None
        assert pack_joint("int8", [_drawn(WIDE // 2, 64), _drawn(WIDE // 2, 64)]) is None


def test_shapes_that_int4_cannot_take_are_int8() -> None:
    assert isinstance(pack("int4", _drawn(64, 96)), Int4Weights)
    assert isinstance(pack("int4", _drawn(64, 95)), Int8Weights)
    assert isinstance(pack("int4", _drawn(60, 96)), Int8Weights)


def test_bytes_are_counted() -> None:
    numbers = WIDE * 64
    sizes = {name: pack(name, _drawn(WIDE, 64)).nbytes / numbers for name in FORMS}
    assert sizes["bfloat16"] == sizes["float16"] == 2 and sizes["int8-dynamic"] == 1
    assert sizes["int8"] == pytest.approx(2, abs=0.1)  # few rows and many
    assert sizes["int4"] == pytest.approx(1.125, abs=0.01)
    assert pack("int8", _drawn(64, 64)).nbytes / 4096 == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("avx512", [False, True])
def test_wide_layers_of_bfloat16_are_held_once_on_avx512(
    monkeypatch: pytest.MonkeyPatch, avx512: bool
) -> None:
    monkeypatch.setattr(weight_forms, "has_avx512", lambda: avx512)
    weight, x = _drawn(WIDE, 64).bfloat16(), _drawn(3, 64, seed=1).bfloat16()
    form = pack("int8", weight)
    twice = has_fbgemm() and not avx512
    assert form.nbytes / weight.numel() == pytest.approx(1 + twice, abs=0.1)
    assert _error(form.product(x), x.double() @ form.weight().double().t()) < KERNEL["int8"]


@pytest.mark.parametrize("rows", [1, FEW, 40])
def test_bfloat16_is_the_same_with_and_without_onednn(
    monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    weight, x = _drawn(100, 70), _drawn(rows, 70, seed=1)
    laid_out = pack("bfloat16", weight)
    monkeypatch.setattr(weight_forms, "has_onednn", lambda: False)
    plain = pack("bfloat16", weight)
    assert torch.equal(laid_out.weight(), plain.weight())
    assert torch.equal(plain.weight(), weight.bfloat16().float())
    torch.testing.assert_close(laid_out.product(x), plain.product(x), rtol=0.02, atol=0.02)
    assert laid_out.nbytes == plain.nbytes == 2 * weight.numel()


def test_processors_without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_forms, "has_fbgemm", lambda: False)
    weight, x = _drawn(WIDE, 64), _drawn(2, 64, seed=1)
    found = pack("int8", weight)
    assert _error(found.product(x), x.double() @ found.weight().double().t()) < KERNEL["int8"]
    for name in ("float16", "int8-dynamic"):
        with pytest.raises(ModelError, match=f"weights='{name}' needs FBGEMM.*weights='int8'"):
            pack(name, weight)


def test_packing_leaves_the_engine_of_torch_as_it_was() -> None:
    before = torch.backends.quantized.engine
    pack("int8-dynamic", _drawn(64, 64))
    assert torch.backends.quantized.engine == before


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 17), (5, 64), (3, 5), (70, 33)])
@pytest.mark.parametrize("fbgemm", [True, False])
def test_int8_of_no_whole_blocks(
    outputs: int, inputs: int, fbgemm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of torch crashes on such shapes, or returns what lies behind the weights."""
    monkeypatch.setattr(weight_forms, "has_fbgemm", lambda: fbgemm)
    form, x = pack("int8", _drawn(outputs, inputs)), _drawn(3, inputs, seed=1)
    assert _error(form.product(x), x.double() @ form.weight().double().t()) < 2e-3


def test_unknown_forms() -> None:
    with pytest.raises(ModelError, match=r"'int9'.*int8"):
        pack("int9", _drawn(64, 64))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bias_is_added_to_the_product(name: str, rows: int, dtype: torch.dtype) -> None:
    weight, x = _drawn(64, 64), _drawn(rows, 64, seed=1).to(dtype)
    bias = _drawn(64, 1, seed=2)[:, 0].to(dtype)
    form = pack(name, weight)
    found, plain = form.product(x, bias), form.product(x)
    assert found.dtype == dtype
    off = 0.0 if dtype is torch.float32 else 0.02  # oneDNN rounds once
    torch.testing.assert_close(found, plain + bias, rtol=off, atol=off)


@pytest.mark.skipif(not has_onednn(), reason="oneDNN multiplies no bfloat16 here")
@pytest.mark.parametrize(
    ("name", "variant", "function"),
    [
        ("swish", "", F.silu),
        ("gelu", "tanh", partial(F.gelu, approximate="tanh")),
        ("gelu", "none", F.gelu),
    ],
)
def test_an_activation_or_a_factor_inside_a_product(name: str, variant: str, function: Any) -> None:
    """Told apart where they are far from each other: at -3 the forms of GELU by a tenth."""
    x = torch.linspace(-4, 4, 64 * 32).bfloat16().view(-1, 32)
    form = FORMS["bfloat16"](torch.eye(32).bfloat16())
    found = form.activated(x, None, name, variant)
    torch.testing.assert_close(found, function(x.float()).bfloat16(), rtol=0.01, atol=1e-5)
    bias = torch.ones(32).bfloat16()
    torch.testing.assert_close(
        form.times(x, found, bias), ((x.float() + 1) * found).bfloat16(), rtol=0.01, atol=1e-5
    )
