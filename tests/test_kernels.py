"""Kernels without a GPU: the interpreter against the reference, and compilation for real chips."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import assert_clean, compiled, interpreted, planted

pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")

AGAINST_REFERENCE = """
import torch
from mmfast.kernels.max_min_select import max_min_select
from mmfast.ops.max_min import _SAME, max_min
from mmfast.ops.unit import unit_rows

def select(x, count):
    rows = unit_rows(x)
    similarity = (rows @ rows.T).clamp_(max=_SAME)
    nearest = similarity.fill_diagonal_(-torch.inf).amax(-1)
    # Rows of a larger poisoned matrix: whatever is read outside would win.
    poisoned = torch.full((len(x) + 3, len(x) + 5), -torch.inf)
    poisoned[: len(x), : len(x)] = similarity
    view = poisoned[: len(x), : len(x)]
    return max_min_select(view[None], nearest.argmin()[None], count)[0]

torch.manual_seed(0)
for n, count in [(1, 1), (2, 2), (5, 3), (31, 31), (64, 16), (100, 40)]:
    x = torch.randn(n, 12)
    assert select(x, count).tolist() == max_min(x, count).tolist(), (n, count)
repeated = torch.randn(7, 12).repeat(4, 1)
assert select(repeated, 20).tolist() == max_min(repeated, 20).tolist()
assert select(torch.ones(9, 4), 5).tolist() == [0, 1, 2, 3, 4]
assert sorted(select(torch.zeros(9, 4), 9).tolist()) == list(range(9))
both = torch.randn(2, 33, 8)
unit = unit_rows(both)
first = torch.tensor([4, 30])
together = max_min_select(unit @ unit.transpose(1, 2), first, 9)
for item in range(2):
    alone = max_min_select((unit[item] @ unit[item].T)[None], first[item : item + 1], 9)
    assert alone[0].equal(together[item])
print("same picks")
"""

SIGNATURE = {"similarity_ptr": "*fp32", "first_ptr": "*i64", "picks_ptr": "*i64"}
SIGNATURE |= dict.fromkeys(["n", "count"], "i32") | dict.fromkeys(
    ["item_stride", "row_stride"], "i64"
)


def test_interpreter_agrees_with_the_reference() -> None:
    assert "same picks" in interpreted(AGAINST_REFERENCE)


def test_compiles_without_spills() -> None:
    from mmfast.kernels.max_min_select import warps

    jobs = [
        {
            "fn": "_select",
            "signature": SIGNATURE,
            "constexprs": {"block": block},
            "capability": capability,
            "num_warps": warps(block),
        }
        for block in (2048, 8192, 16384)
        for capability in (80, 90, 100)
    ]
    for binary in compiled("max_min_select", jobs):
        assert_clean(binary)
        assert "LDG" in binary.sass


def test_gates_fail_on_planted_bugs() -> None:
    planted(
        "max_min_select",
        AGAINST_REFERENCE,
        ("tl.maximum(nearest, similarity)", "tl.minimum(nearest, similarity)"),
        ("inside = columns < n", "inside = columns < n - 1"),
        ("item * count + step", "item * n + step"),
    )


def test_bfloat16_arithmetic_is_refused_on_the_interpreter() -> None:
    code = """
import torch, triton, triton.language as tl
@triton.jit
def kernel(x_ptr, out_ptr, cast: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    x = x.to(tl.float32) if cast else x
    tl.store(out_ptr + tl.arange(0, 4), x + x)
x, out = torch.arange(4).bfloat16(), torch.empty(4)
kernel[(1,)](x, out, cast=True)
assert out.tolist() == [0.0, 2.0, 4.0, 6.0]
try:
    kernel[(1,)](x, out, cast=False)
except Exception as error:
    assert "bfloat16 reached" in str(error), error
    print("refused")
"""
    assert "refused" in interpreted(code)


def test_bad_arguments_are_refused() -> None:
    from mmfast.kernels.max_min_select import max_min_select

    first = torch.zeros(1, dtype=torch.int64)
    for shape, count in [((1, 4, 5), 2), ((1, 4, 4), 5), ((1, 4, 4), 0)]:
        with pytest.raises(ValueError, match="picks"):
            max_min_select(torch.zeros(shape), first, count)
    with pytest.raises(ValueError, match="float64"):
        max_min_select(torch.zeros(1, 4, 4, dtype=torch.float64), first, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n", [1, 2, 300, 1568, 6272])
def test_device_picks_what_the_host_picks(n: int) -> None:
    from mmfast.ops.max_min import max_min

    x = torch.randn(n, 64, generator=torch.Generator().manual_seed(n))
    count = max(1, n // 4)
    assert set(max_min(x.cuda(), count).tolist()) == set(max_min(x, count).tolist())
    still = x[: max(1, n // 3)].repeat(4, 1)[:n]
    assert sorted(set(max_min(still.cuda(), n).tolist())) == list(range(n))
