"""Attention received: the formula in float64, the chunks, and the signals made of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from oracles_ops import attention_column_sums_reference
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mmfast.core.errors import SpecError
from mmfast.models.reduction.probe import Levels, head_mass, received, received_within
from mmfast.ops import attention_column_sums as column_chunks
from mmfast.ops.attention import attend
from mmfast.ops.attention_column_sums import (
    attention_column_sums,
)

SHAPES = {
    "grouped, longer keys": (2, 6, 2, 50, 60, 8),
    "longer queries": (1, 4, 4, 70, 50, 24),
    "one of each": (1, 1, 1, 1, 1, 3),
    "odd": (3, 5, 5, 31, 17, 7),
}


def _tensors(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    items, heads, shared, length, size, width = shape
    torch.manual_seed(0)
    q = torch.randn(items, length, heads, width, dtype=torch.float64).transpose(1, 2)
    return q, torch.randn(items, shared, size, width, dtype=torch.float64)


@pytest.mark.parametrize("tile", [1, 1 << 20])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_chunks_agree_with_the_formula(
    shape: tuple[int, ...], causal: bool, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(column_chunks._TILE, "cpu", tile)
    monkeypatch.setattr(column_chunks, "_FEWEST", 7)
    q, k = _tensors(shape)
    items, heads, shared, length, size, _ = shape
    lse = torch.logsumexp(_logits(q, k, causal), -1)
    visible = torch.rand(items, 1, length, size) > 0.4
    bias = torch.randn(heads, 1, size)
    first, last = length // 3, length - length // 4
    weights = torch.rand(items, 1, length, dtype=torch.float64)
    inside = torch.zeros(length, dtype=torch.float64)
    inside[first:last] = 1
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"lse": lse}, {}),
        ({"weights": weights}, {"weights": weights}),
        ({"mask": visible}, {"mask": visible}),
        ({"mask": bias}, {"mask": bias}),
        ({"queries": (first, last)}, {"weights": inside}),
    ]
    for given, meant in cases:
        want = attention_column_sums_reference(q, k, scale=0.3, causal=causal, **meant)
        for kind, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
            for heads_as, sums in _by_heads(want, shared).items():
                got = attention_column_sums(
                    q.to(kind), k.to(kind), scale=0.3, causal=causal, heads=heads_as, **given
                )
                assert got.dtype == kind
                torch.testing.assert_close(got.double(), sums, atol=tolerance, rtol=tolerance)


def _logits(q: Tensor, k: Tensor, causal: bool, scale: float = 0.3) -> Tensor:
    logits = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) * scale
    seen = torch.ones(logits.shape[2:]).tril(k.shape[2] - q.shape[2]).bool()
    return logits.masked_fill(~seen, -torch.inf) if causal else logits


def _by_heads(sums: Tensor, shared: int) -> dict[Any, Tensor]:
    grouped = sums.unflatten(1, (shared, -1)).sum(2)
    return {"query": sums, "key": grouped, "all": sums.sum(1)}


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_attend_to_themselves(causal: bool) -> None:
    q, k = _tensors((1, 4, 2, 40, 40, 8))
    ends = [0, 7, 7, 30, 38]
    want = torch.zeros(1, 40, dtype=torch.float64)
    for i, j in pairwise(ends):
        part = attention_column_sums_reference(q[:, :, i:j], k[:, :, i:j], causal=causal)
        want[:, i:j] = part.sum(1)
    got = attention_column_sums(q, k, causal=causal, cu_seqlens=torch.tensor(ends))
    torch.testing.assert_close(got, want)
    q, k = _tensors((3, 4, 2, 40, 40, 8))
    got = attention_column_sums(q, k, causal=causal, lengths=torch.tensor([40, 0, 13]))
    for row, n in enumerate([40, 0, 13]):
        one, two = q[row : row + 1, :, :n], k[row : row + 1, :, :n]
        want = attention_column_sums_reference(one, two, causal=causal).sum(1)
        torch.testing.assert_close(got[row : row + 1, :n], want)
        assert not got[row, n:].any()


def test_half_precision_is_summed_in_float32() -> None:
    q, k = (x.bfloat16() for x in _tensors((2, 4, 2, 30, 50, 16)))
    got = attention_column_sums(q, k, causal=True, heads="query")
    want = attention_column_sums_reference(q.double(), k.double(), causal=True)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("masked", ["no", "bool", "additive"])
@pytest.mark.parametrize("causal", [False, True])
def test_attend_is_the_stock_output_and_its_level(causal: bool, masked: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 70, 16), torch.randn(2, 2, 70, 16), torch.randn(2, 2, 70, 16)
    mask = None
    if masked != "no":
        mask = (torch.rand(2, 1, 70, 70) > 0.3) | torch.eye(70, dtype=torch.bool)
        mask = mask if masked == "bool" else torch.randn(2, 1, 70, 70)
        causal = False  # sdpa takes either
    out, lse = attend(q, k, v, mask, causal, 0.4)
    stock = scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=0.4, enable_gqa=True
    )
    assert torch.equal(out, stock)
    assert lse is not None
    want = attention_column_sums_reference(
        q.double(), k.double(), scale=0.4, causal=causal, mask=mask
    )
    got = attention_column_sums(q, k, lse, scale=0.4, causal=causal, mask=mask, heads="query")
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_shapes_that_do_not_go_together_are_refused() -> None:
    q, k = torch.zeros(2, 4, 9, 8), torch.zeros(2, 3, 9, 8)
    with pytest.raises(SpecError, match="H a multiple of Hkv"):
        attention_column_sums(q, k)
    with pytest.raises(SpecError, match="one batch row"):
        attention_column_sums(q, q, cu_seqlens=torch.tensor([0, 9]))
    with pytest.raises(SpecError, match="query range"):
        attention_column_sums(q, q, lengths=torch.tensor([9, 9]), queries=(0, 3))
    with pytest.raises(SpecError, match="L = S"):
        attention_column_sums(q, q[:, :, :5], lengths=torch.tensor([5, 5]))


def test_no_matrix_of_attention_weights() -> None:
    """Every tensor that the chunks allocate is a small part of L x S."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    q, k = torch.randn(1, 2, 3000, 4), torch.randn(1, 1, 3000, 4)
    with Watch():
        attention_column_sums(q, k, causal=True)
    assert largest <= column_chunks._TILE["cpu"] < 3000 * 3000 / 8


def _masks(length: int) -> dict[str, Any]:
    """Kinds of causal masks of two prompts, the second padded on the left by 20 tokens."""
    keep = torch.ones(2, length, dtype=torch.bool)
    keep[1, :20] = False
    four = (torch.ones(length, length, dtype=torch.bool).tril() & keep[:, None])[:, None]
    block = create_block_mask(
        lambda b, h, i, j: (i >= j) & keep[b, j], 2, None, length, length, device="cpu"
    )
    additive = torch.zeros(four.shape).masked_fill(~four, torch.finfo(torch.float32).min)
    return {"four": four, "additive": additive, "padding": keep.long(), "flex": block}


@pytest.mark.parametrize("kind", ["four", "additive", "padding", "flex"])
def test_scores_of_many_queries_are_their_rows_in_sum(kind: str) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 6, 150, 8), torch.randn(2, 2, 150, 8)
    masks = _masks(150)
    want = attention_column_sums_reference(q, k, scale=0.3, mask=masks["four"])
    got = received(q, k, 0.3, True, masks[kind])
    torch.testing.assert_close(got[0], want[0].mean(0) / 150, atol=1e-6, rtol=0)
    torch.testing.assert_close(got[1], want[1].mean(0) / 130, atol=1e-6, rtol=0)
    for places in (torch.arange(20, 150), torch.arange(20, 150, 2), torch.arange(140, 150)):
        chosen = torch.zeros(150).index_fill_(0, places, 1.0)
        want = attention_column_sums_reference(q, k, scale=0.3, mask=masks["four"], weights=chosen)
        for row in range(2):
            mass = head_mass(q, k, row, places, masks[kind], 0.3, True)
            wanted = want[row].unflatten(0, (2, 3)).mean(1)
            torch.testing.assert_close(mass, wanted, atol=2e-5, rtol=0)


def test_packed_segments_sum_to_one_each() -> None:
    q, k = (x.float() for x in _tensors((1, 4, 2, 40, 40, 8)))
    ends = torch.tensor([0, 7, 30, 40], dtype=torch.int32)
    want = [received(q[:, :, i:j], k[:, :, i:j]) for i, j in pairwise(ends.tolist())]
    got = received_within(q, k, ends)
    torch.testing.assert_close(got, torch.cat(want, dim=1), atol=1e-6, rtol=0)


class _Attending(nn.Module):
    """What transformers hands to its attention functions."""

    is_causal = True
    num_key_value_groups = 3


@pytest.mark.parametrize("kind", [None, "four", "additive"])
def test_levels_are_caught_and_the_output_is_the_stock_one(kind: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 150, 16), torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16)
    mask = None if kind is None else _masks(150)[kind]
    stock, _ = sdpa_attention_forward(_Attending(), q, k, v, mask, scaling=0.3)
    with Levels() as levels:
        out, _ = sdpa_attention_forward(_Attending(), q, k, v, mask, scaling=0.3)
        assert torch.equal(q.softmax(-1), torch.softmax(q, -1))  # others go on as they are
    assert torch.equal(out, stock)
    lse = levels.of(q)
    assert lse is not None and levels.of(q[:, :, :9]) is None
    got = received(q, k, 0.3, True, mask, lse)
    torch.testing.assert_close(got, received(q, k, 0.3, True, mask), atol=1e-6, rtol=0)
    shifted = received(q, k, 0.3, True, mask, lse + 1)  # it is really used
    torch.testing.assert_close(shifted * torch.e, got, atol=1e-6, rtol=0)


def test_two_calls_or_dropout_leave_no_level() -> None:
    q = torch.randn(1, 2, 70, 16)
    with Levels() as levels:
        scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert levels.of(q) is None
    with Levels() as levels:
        for _ in range(2):
            scaled_dot_product_attention(q, q, q)
    assert levels.of(q) is None
