"""Kernels without a GPU: the interpreter against the reference, and compilation for real chips."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
triton = pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")

# Triton 3.6 turns a loop bound into an index through an array of one element, which numpy 2.4
# refuses; reading that element by hand is what later releases do.
INTERPRETER = """
import triton.runtime.interpreter as interpreter
patch = interpreter._patch_lang_tensor
def patched(tensor, *scope):
    patch(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.reshape(-1)[0])
interpreter._patch_lang_tensor = patched
"""

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

COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from mmfast.kernels.max_min_select import _select, warps

capability, block = int(sys.argv[1]), int(sys.argv[2])
names = ["similarity_ptr", "first_ptr", "picks_ptr"]
types = ["*fp32", "*i64", "*i64"]
signature = dict(zip(names, types)) | dict.fromkeys(["n", "count"], "i32")
signature |= dict.fromkeys(["item_stride", "row_stride"], "i64") | {"block": "constexpr"}
source = ASTSource(fn=_select, signature=signature, constexprs={"block": block})
target = GPUTarget("cuda", capability, 32)
compiled = triton.compile(source, target=target, options={"num_warps": warps(block)})
open(sys.argv[3], "wb").write(compiled.asm["cubin"])
"""


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run code in a process of its own: Triton reads its switches when it is imported."""
    clean = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_interpreter_agrees_with_the_reference() -> None:
    assert "same picks" in python(INTERPRETER + AGAINST_REFERENCE, TRITON_INTERPRET="1")


@pytest.mark.parametrize("block", [2048, 8192, 16384])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles_without_spills(capability: int, block: int, tmp_path: Path) -> None:
    binary = tmp_path / "kernel.cubin"
    cache = str(tmp_path / "cache")
    python(COMPILE, str(capability), str(block), str(binary), TRITON_CACHE_DIR=cache)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    usage = subprocess.run(
        [tools / "cuobjdump", "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    stack, local = re.search(r"STACK:(\d+).*LOCAL:(\d+)", usage).groups()
    assert int(stack) == int(local) == 0, usage
    code = subprocess.run(
        [tools / "cuobjdump", "-sass", binary], capture_output=True, text=True, check=True
    ).stdout
    assert "STL" not in code and "LDG" in code


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
