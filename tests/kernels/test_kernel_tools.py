"""The gates themselves: what they let pass and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from kernel_tools import edited, interpreted, planted

pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")

KERNEL = "temporal_difference"

GUARD = """
import torch, triton, triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, bound, way: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    y = tl.load(x_ptr + 1)
    if way == 0:
        x = x.to(tl.float32)
        out = x + x
    elif way == 1:
        out = x + x
    elif way == 2:
        out = tl.where(x > y, 1.0, 0.0)
    else:
        out = tl.dot(x[:, None], x[None, :]).sum(1)
    for _ in range(bound):  # a bound that is not known before it runs
        out += 1.0
    tl.store(out_ptr + tl.arange(0, 4), out)

x, out = torch.arange(4).bfloat16(), torch.empty(4)
kernel[(1,)](x, out, 3, way=0)
assert out.tolist() == [3.0, 5.0, 7.0, 9.0]
for way in (1, 2, 3):
    try:
        kernel[(1,)](x, out, 0, way=way)
    except Exception as error:
        assert "bfloat16 reached arithmetic" in str(error), error
    else:
        raise AssertionError(f"way {way} computed with bfloat16")
print("refused")
"""

GATE = """
import torch
from mmfast.kernels.temporal_difference import static_runs
found = static_runs(torch.tensor([[True], [False], [True]])).flatten().tolist()
assert found == [1, 0, 1], found
"""


def test_bfloat16_arithmetic_is_refused_on_the_interpreter() -> None:
    assert "refused" in interpreted(GUARD)


def test_code_that_fails_in_the_interpreter_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        interpreted("1 / 0")


@pytest.mark.slow
def test_only_bugs_that_are_caught_for_the_right_reason_count() -> None:
    caught = ("frame[:, None] - latest", "latest - frame[:, None]")
    planted(KERNEL, GATE, caught)
    harmless = ("changed = tl.full((rows,), -1", "changed = tl.full((rows,), -1 + 0")
    with pytest.raises(AssertionError, match="was not caught: passed"):
        planted(KERNEL, GATE, caught, harmless)
    broken = ("frame[:, None] - latest", "frame[:, None] - nothing")
    with pytest.raises(AssertionError, match="NameError"):
        planted(KERNEL, GATE, broken)


def test_a_gate_that_fails_without_a_bug_proves_nothing() -> None:
    with pytest.raises(AssertionError, match="never"):
        planted(KERNEL, "raise AssertionError('never')", ("frame[:, None] - latest", "latest"))


def test_a_bug_has_one_place(tmp_path: Path) -> None:
    for text in ("nowhere to be found", "tl.load"):
        with pytest.raises(AssertionError, match="times in kernels"):
            edited(KERNEL, text, "", tmp_path)
    copies = [edited(KERNEL, "_ELEMENTS = 4096", f"_ELEMENTS = {n}", tmp_path) for n in (1, 2)]
    assert len({copy.read_text(encoding="utf-8") for copy in copies}) == 2
