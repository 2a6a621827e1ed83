"""The kernel of attention to chosen entries: interpreted, with bugs, and as machine code."""

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
    interpreted,
    planted,
)
from torch import Tensor

from mmfast.ops.pages import selected_attention

pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")

KERNEL = "selected_attention"

# Whatever is not chosen is NaN, and so is what lies around the cache, the queries and the result:
# NaN in a result is a row that was read, or left unwritten, where none should be.
CASES = """
import torch
from oracles_ops import selected_attention_reference as formula

empty = torch.empty
def poisoned(*shape, **more):
    made = empty(*shape, **more)
    return made.fill_(torch.nan) if made.is_floating_point() else made

def inside(x):
    b, h, n, d = x.shape
    room = torch.full((b + 1, n + 5, h + 1, d + 4), torch.nan).to(x.dtype)
    room[:b, 3 : 3 + n, :h, :d] = x.transpose(1, 2)
    return room[:b, 3 : 3 + n, :h, :d].transpose(1, 2)

def draw(items, shared, group, n, count, width, v_width=None, dtype=torch.float32, per_head=True,
         ragged=False, biased=0, void=False):
    query = torch.randn(items, shared * group, 1, width).to(dtype)
    keys = torch.randn(items, shared, n, width).to(dtype)
    values = torch.randn(items, shared, n, v_width or width).to(dtype)
    heads = shared if per_head else 1
    index = torch.rand(items, heads, n).argsort(-1)[..., :count]
    real = torch.rand(items, heads, count) < 0.6 if ragged else None
    if void:
        real[0, 0] = False
    bias = 3 * torch.randn(items, biased, n).to(dtype) if biased else None
    want = formula(query, keys, values, index, real, bias, scale=0.3)
    taken = torch.zeros(items, heads, n, dtype=torch.bool)
    taken.scatter_(2, index, torch.ones_like(index, dtype=torch.bool) if real is None else real)
    rest = ~taken.expand(items, shared, n)[..., None]
    keys, values = (inside(x.masked_fill(rest, torch.nan)) for x in (keys, values))
    long = torch.full((items, heads, count + 9), n - 1)  # places behind the last one
    long[..., :count] = index
    if real is not None:
        room = torch.ones(items, heads, count + 9, dtype=torch.bool)
        room[..., :count] = real
        real = room[..., :count]
    return (inside(query), keys, values, long[..., :count], real, bias), want
"""
GATE = (
    CASES
    + """
from mmfast.kernels import selected_attention as kernels

torch.manual_seed(0)
kernels.tiles = lambda *_: kernels.EntryTiles(16, 16, 4, 1)

def case(*shape, parts=1, tolerance=2e-6, **more):
    (query, keys, values, index, real, bias), want = draw(*shape, **more)
    chunk = -(-index.shape[2] // (16 * parts)) * 16
    kernels.parts_of = lambda count, *_: (-(-count // chunk), chunk)
    torch.empty = poisoned
    got = kernels.selected_attention(query, keys, values, index, 0.3, real, bias)
    torch.empty = empty
    assert got.dtype == query.dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)

case(2, 2, 3, 60, 37, 12)
case(1, 2, 4, 90, 70, 16, 24, parts=3, ragged=True, biased=8)
case(2, 1, 7, 50, 50, 20, 5, parts=2, biased=1, per_head=False)
case(2, 3, 1, 40, 19, 16, per_head=False, ragged=True, parts=2)
case(1, 1, 19, 40, 33, 16, parts=2)  # more queries than a program holds
case(2, 2, 2, 40, 34, 16, ragged=True, void=True)
case(1, 2, 2, 90, 80, 8, ragged=True, void=True, parts=5)
case(1, 2, 2, 20, 1, 3)
case(2, 4, 2, 330, 320, 8, parts=20)  # joined in two rounds
case(1, 2, 5, 50, 40, 16, dtype=torch.bfloat16, parts=2, tolerance=8e-3, biased=10)
case(1, 2, 2, 50, 20, 24, 16, dtype=torch.float16, tolerance=2e-3, ragged=True)
"""
)

BUGS = {
    "the group of a head": ("head * group + row", "head + row"),
    "fillers are read": ("mask=here, other=0) != 0)", "mask=here, other=0) >= 0)"),
    "the last entry": ("here = entry < end", "here = entry <= end"),
    "the place of a bias": ("b_head + place[None, :]", "b_head + entry[None, :]"),
    "the mass of earlier tiles": ("mass = mass * fade + tl.sum(shares", "mass = mass + tl.sum(shares"),
    "the sums of earlier tiles": ("total * fade[:, None] + found", "total + found"),
    "rows without entries": (
        "tl.where(higher == -float(\"inf\"), 0.0, higher)  # nothing", "higher  # nothing"
    ),
    "rows without any entry": ("tl.where(mass > 0, mass, 1.0)[:, None]", "mass[:, None]"),
    "the width of a value": ("v_row * unit, v_width", "v_row * unit, width"),
    "the width of a head": ("(column < width)[None", "(column <= width)[None"),
    "the level of a part": ("share = tl.exp2((level - base)", "share = tl.exp2((base - base)"),
    "earlier parts": ("total * fade + tl.sum(tile", "total + tl.sum(tile"),
    "parts without entries": ("base = tl.where(higher == -float(\"inf\"), 0.0, higher)", "base = higher"),
    "where a part is": ("* tl.num_programs(0) + part", "* tl.num_programs(0)"),
}  # fmt: skip


@pytest.mark.slow
def test_interpreter_agrees_with_the_formula_and_planted_bugs_do_not() -> None:
    planted(KERNEL, GATE, *BUGS.values())
