"""The kernel of attention received without a GPU: interpreted, with bugs, and as machine code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_tools import (
    CAPABILITIES,
    assert_clean,
    compiled,
    has_tensor_cores,
    has_wide_loads,
    planted,
)

from mmfast.ops.attention_column_sums import attention_column_sums

KERNEL = "attention_column_sums"

# Queries, keys and their levels lie in larger poisoned tensors, and so does what is written: NaN
# in a result is a value read or left where none should be.
GATE = """
import torch
from mmfast.kernels import attention_column_sums as kernels
from oracles_ops import attention_column_sums_reference as formula

kernels.tiles = lambda *_: kernels.Tiles(16, 16, 4, 1)
torch.empty = lambda *shape, **more: torch.full(shape, torch.nan, **more)
torch.manual_seed(0)

def inside(x):
    b, h, n, d = x.shape
    room = torch.full((b + 1, n + 40, h + 1, d + 4), torch.nan).to(x.dtype)
    room[:b, 8 : 8 + n, :h, :d] = x.transpose(1, 2)
    return room[:b, 8 : 8 + n, :h, :d].transpose(1, 2)

def case(heads, shared, length, size, width, dtype=torch.float32, tolerance=2e-6, spans=None,
         items=1, causal=True, queries=None, weighted=False):
    q = torch.randn(items, heads, length, width).to(dtype)
    k = torch.randn(items, shared, size, width).to(dtype)
    w = torch.rand(items, heads, length) if weighted else torch.ones(1, 1, 1)
    w = w.expand(items, heads, length).contiguous()
    first, last = queries or (0, length)
    some = w.clone()
    some[..., :first] = some[..., last:] = 0
    want = torch.zeros(items, heads, size, dtype=torch.float64)
    level = torch.full((items, heads, length), -torch.inf, dtype=torch.float64)
    table = [(b, 0, None) for b in range(items)] if spans is None else spans
    for b, i, j in table:
        one, two = q[b : b + 1, :, i:j].double(), k[b : b + 1, :, i:j].double()
        part = some[b : b + 1, :, i:j]
        want[b, :, i:j] = formula(one, two, scale=0.3, causal=causal, weights=part)[0]
        logits = one @ two.repeat_interleave(heads // shared, 1).transpose(2, 3) * 0.3
        if causal:
            n, s = logits.shape[2:]
            logits = logits.masked_fill(~torch.ones(n, s).tril(s - n).bool(), -torch.inf)
        level[b, :, i:j] = logits.logsumexp(-1)[0]
    q, k = inside(q), inside(k)
    table = None if spans is None else torch.tensor(spans, dtype=torch.int32)
    longest = None if spans is None else max(j - i for _, i, j in spans)
    lse = kernels.log_sum_exp(q, k, 0.3, causal, table, longest)
    torch.testing.assert_close(lse.double(), level, atol=tolerance, rtol=tolerance)
    room = torch.full((items, heads + 1, length + 40), torch.nan)
    room[:, :heads, 8 : 8 + length] = lse
    lse = room[:, :heads, 8 : 8 + length]
    got = kernels.attention_column_sums(
        q, k, lse, 0.3, causal, queries, w if weighted else None, table, longest
    )
    torch.testing.assert_close(got.double(), want, atol=10 * tolerance, rtol=10 * tolerance)

packed = [(0, 0, 5), (0, 5, 5), (0, 5, 30), (0, 30, 46)]
case(4, 2, 19, 35, 12)
case(2, 2, 21, 37, 16, causal=False)
case(2, 1, 20, 45, 8, queries=(3, 17), weighted=True)
case(2, 1, 37, 20, 24)
case(1, 1, 33, 17, 16, causal=False, queries=(16, 33))
case(2, 1, 47, 47, 16, spans=packed)
case(1, 1, 47, 47, 12, spans=packed, causal=False, weighted=True)
case(2, 1, 36, 36, 16, spans=[(0, 0, 33), (2, 16, 36)], items=3)
case(2, 1, 19, 35, 16, dtype=torch.bfloat16, items=2)
case(1, 1, 33, 18, 24, dtype=torch.bfloat16, causal=False)
case(1, 1, 19, 18, 16, dtype=torch.float16)
case(1, 1, 1, 1, 3)
"""

BUGS = {
    "the causal edge": ("key_place[:, None] <= (place", "key_place[:, None] < (place"),
    "the group of a head": (
        "head // heads_per_key * k_head) * unit\n    lse",
        "head % heads_per_key * k_head) * unit\n    lse",
    ),
    "the tail of the queries": ('other=float("inf")', "other=0.0"),
    "the end of the masked part": ("first + held - 1 - offset", "first - offset"),
    "where queries stand among keys": ("(place + offset)[None", "place[None"),
    "the tail of the keys": ("(key_place < size)[None, :]", "(key_place <= size)[None, :]"),
    "the width of a head": ("(column < width)", "(column <= width)"),
    "the first key of a sequence": (
        "first, size, offset = begin +",
        "first, size, offset = 1 + begin +",
    ),
}


@pytest.mark.slow
def test_interpreter_agrees_with_the_formula_and_planted_bugs_do_not() -> None:
    planted(KERNEL, GATE, *BUGS.values())


def _job(fn: str, capability: int, kind: str, width: int, causal: bool) -> dict[str, Any]:
    from mmfast.kernels.attention_column_sums import _INTEGERS, tiles

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[kind]
    plan = tiles(capability, dtype, width)
    pointers = {"lse": "*fp32", "weight": "*fp32", "spans": "*i32", "out": "*fp32"}
    types = {"query": f"*{kind}", "key": f"*{kind}", "scale": "fp32"} | pointers
    constants = {"causal": causal, "ragged": not causal, "held": plan.held, "step": plan.step}
    constants |= {"width": width, "padded": 1 << (width - 1).bit_length(), "upcast": False}
    return {
        "fn": fn,
        "signature": types | dict.fromkeys(_INTEGERS, "i32"),
        "constexprs": constants
        | {"unit": 16 // dtype.itemsize}
        | ({"weighted": causal} if fn == "_column_sums" else {}),
        "capability": capability,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
        "aligned": ["query", "key"],
    }


@pytest.mark.slow
def test_compiles_without_spills() -> None:
    jobs = [_job("_column_sums", chip, "bf16", 128, True) for chip in CAPABILITIES]
    jobs += [_job("_column_sums", chip, "bf16", 72, False) for chip in (80, 90, 100)]
    jobs += [_job("_log_sum_exp", chip, "bf16", 128, True) for chip in (89, 90, 100)]
    for binary in compiled(KERNEL, jobs):
        assert_clean(binary)
        assert has_wide_loads(binary), binary.label
        assert has_tensor_cores(binary), binary.label


def test_bad_arguments_are_refused() -> None:
    from mmfast.kernels.attention_column_sums import attention_column_sums as kernel

    x, lse = torch.zeros(1, 4, 8, 16), torch.zeros(1, 4, 8)
    for query, key, said in (
        (x, x[:, :3], "factor of H"),
        (x, x[..., :8], "factor of H"),
        (x.expand(1, 4, 8, 16).repeat(1, 1, 1, 8), x.repeat(1, 1, 1, 8), "D <= 64"),
        (x, x.half(), "one type"),
        (x.double(), x.double(), "float64"),
        (x, x.transpose(2, 3).contiguous().transpose(2, 3), "contiguous in D"),
    ):
        with pytest.raises(ValueError, match=said):
            kernel(query, key, lse, 1.0)
    with pytest.raises(ValueError, match="contiguous in L"):
        kernel(x, x, torch.zeros(1, 8, 4).transpose(1, 2), 1.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 28, 4, 1632, 1632, 128), (4, 16, 16, 729, 729, 72)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_device_sums_what_the_host_sums(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    items, heads, shared, length, size, width = shape
    q = torch.randn(items, length, heads, width, device="cuda", dtype=dtype).transpose(1, 2)
    k = torch.randn(items, size, shared, width, device="cuda", dtype=dtype).transpose(1, 2)
    got = attention_column_sums(q, k, causal=causal, heads="query")
    want = attention_column_sums(q.double(), k.double(), causal=causal, heads="query")
    torch.testing.assert_close(got.double(), want, atol=1e-4, rtol=1e-3)
