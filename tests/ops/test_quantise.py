"""Keys and values in few bits: how far off they may be, what they cost, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import oracles_caches
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfast import MmfastError, SpecError
from mmfast.ops import quantisation as module
from mmfast.ops.quantisation import (
    PackedTensor,
    Quantiser,
    dequantise,
    quantise,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def steps(packed: PackedTensor) -> torch.Tensor:
    """The step at every number, `[..., n, d]` float32."""
    dim = -2 if packed.along_tokens else -1
    wide = packed.step.float().repeat_interleave(packed.group, dim)
    return wide.narrow(dim, 0, packed.n if packed.along_tokens else packed.width)


def worst(x: torch.Tensor, packed: PackedTensor) -> float:
    """The largest error, in half steps; what the dtype itself rounds is taken off."""
    error = (dequantise(packed).double() - x.double()).abs()
    error = (error - x.double().abs() * torch.finfo(x.dtype).eps).clamp_min(0)
    return float((error / (steps(packed).double() / 2).clamp_min(1e-300)).max())


@settings(max_examples=120)
@given(
    n=st.integers(1, 70),
    width=st.integers(1, 40),
    group=st.integers(1, 40),
    bits=st.sampled_from([8, 4, 2]),
    keys=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([1e-4, 1.0, 300.0]),
    shift=st.sampled_from([0.0, -7.0, 1000.0]),
    seed=st.integers(0, 99),
)
def test_off_by_at_most_half_a_step(
    n: int, width: int, group: int, bits: int, keys: bool, dtype: torch.dtype, scale: float,
    shift: float, seed: int,
) -> None:  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, n, width, generator=g) * scale + shift).to(dtype)
    quantiser = Quantiser(bits, group)
    packed = quantiser.pack(x, keys=keys)
    back = dequantise(packed)
    assert back.shape == x.shape and back.dtype == dtype
    assert worst(x, packed) <= 1 + 1e-4
    again = dequantise(quantiser.pack(back, keys=keys))
    assert torch.isfinite(again).all()


@pytest.mark.parametrize("keys", [True, False])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_oracle(bits: int, keys: bool) -> None:
    for seed, (n, width, group) in enumerate([(1, 1, 32), (5, 3, 2), (33, 16, 32), (40, 7, 8)]):
        x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed)) * 3 + 1
        packed = quantise(x, bits, group, along_tokens=keys)
        expected, step = oracles_caches.quant(x.double().numpy(), bits, keys, group)
        assert np.allclose(steps(packed).numpy(), step, rtol=1e-6)
        error = np.abs(dequantise(packed).double().numpy() - expected)
        # A number in the middle between two codes may go either way in float32.
        middle = np.abs(np.abs(x.double().numpy() - expected) - step / 2) < 1e-5 * (step + 1e-9)
        assert (error[~middle] <= 1e-5).all() and (error <= step + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_groups_and_extremes_are_exact(dtype: torch.dtype) -> None:
    for value in (0.0, -0.3, 6e4):
        x = torch.full((3, 33, 5), value).to(dtype)
        for bits in (8, 4, 2):
            for keys in (True, False):
                assert dequantise(quantise(x, bits, 8, along_tokens=keys)).equal(x)
    two = torch.tensor([[-6e4, 6e4], [6e4, -6e4]]).to(dtype)  # the range overflows float16
    for bits in (8, 4, 2):
        back = dequantise(quantise(two, bits, 2, along_tokens=True))
        torch.testing.assert_close(back, two, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_two_numbers_a_group_lose_nothing() -> None:
    x = torch.randint(0, 4, (4, 50, 6)).float()
    x[:, ::2, :] = x[:, ::2, :].clamp(0, 1)
    for keys in (True, False):
        assert dequantise(quantise(x.clamp(0, 3), 8, 1, along_tokens=keys)).equal(x)


@pytest.mark.parametrize(("bits", "bytes_of_codes"), [(8, 64 * 128), (4, 32 * 128), (2, 16 * 128)])
def test_bytes(bits: int, bytes_of_codes: int) -> None:
    x = torch.randn(2, 64, 128, dtype=torch.bfloat16)
    for keys in (True, False):
        packed = Quantiser(bits).pack(x, keys=keys)
        assert packed.codes.dtype == torch.uint8
        scales = 2 * 64 * 128 // 32  # lowest value and step of every group
        assert packed.nbytes == 2 * (bytes_of_codes + 2 * scales)
    odd = Quantiser(bits).pack(torch.randn(7, 5))
    assert odd.codes.numel() == math.ceil(35 * bits / 8)


def test_a_packed_tensor_is_plain_data() -> None:
    x = torch.randn(2, 9, 6)
    packed = Quantiser(4, group=4).pack(x, keys=True)
    tree = vars(packed)
    plain = (torch.Tensor, int, bool)
    assert all(isinstance(value, plain) for value in tree.values())
    assert dequantise(PackedTensor(**tree)).equal(dequantise(packed))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("keys", [True, False])
def test_what_is_not_finite_is_refused(value: float, keys: bool) -> None:
    x = torch.randn(2, 9, 6)
    x[1, 4, 2] = value
    with pytest.raises(MmfastError, match="NaN or infinity"):
        Quantiser(4).pack(x, keys=keys)


@pytest.mark.parametrize("bits", [0, 1, 3, 16, True, 4.0])
def test_other_bits_are_refused(bits: object) -> None:
    with pytest.raises(SpecError, match="8, 4, 2"):
        quantise(torch.randn(2, 3), bits, 4, along_tokens=True)  # type: ignore[arg-type]


def test_keys_of_unlike_channels_need_a_scale_per_channel() -> None:
    x = torch.randn(1, 128, 32)
    x[..., 3] = x[..., 3] * 100  # one large channel, as keys have them
    small = [c for c in range(32) if c != 3]
    error = {
        keys: float((dequantise(Quantiser(4).pack(x, keys=keys)) - x)[..., small].abs().mean())
        for keys in (True, False)
    }
    assert error[True] < 0.1 * error[False]


FAULTS = {
    "_step": lambda low, high, levels: (high - low) / (levels + 1),
    "_into_bytes": lambda codes, bits: module.__dict__["_bytes"](codes.flip(-1), bits),
    "_out_of_bytes": lambda packed, bits, total: module.__dict__["_codes"](packed, bits, total) ^ 1,
    "_grouped": lambda x, group, dim: module.__dict__["_groups"](x.roll(1, dim), group, dim),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for alias, own in (
        ("_bytes", "_into_bytes"),
        ("_codes", "_out_of_bytes"),
        ("_groups", "_grouped"),
    ):
        monkeypatch.setattr(module, alias, getattr(module, own), raising=False)
    x = torch.randn(2, 40, 16, generator=torch.Generator().manual_seed(0))
    assert worst(x, quantise(x, 4, 8, along_tokens=True)) <= 1 + 1e-4
    monkeypatch.setattr(module, name, FAULTS[name])
    assert worst(x, quantise(x, 4, 8, along_tokens=True)) > 1.1
