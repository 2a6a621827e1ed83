"""Segment merge: plain torch against the formula, the kernel against both, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import CAPABILITIES, assert_clean, compiled, has_wide_loads, interpreted, planted
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mmfast.core import reduction as core
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Mix, Reduction, Segments, add_rows
from mmfast.ops.merging import segment_merge, segment_merge_reference

triton = pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")


def drawn(
    lead: tuple[int, ...], n: int, m: int, kind: str, seed: int, dropped: float = 0.2
) -> Segments:
    """Random entries: some outputs are empty, some sources dropped, some used twice."""
    generator = torch.Generator().manual_seed(seed)
    count = 2 * n + 1 if kind == "mix" else n
    output = torch.randint(m, (*lead, count), generator=generator)
    output[torch.rand(*lead, count, generator=generator) < dropped] = -1
    source = torch.randint(n, (*lead, count), generator=generator) if kind == "mix" else None
    weight = None if kind == "mean" else torch.randn(*lead, count, generator=generator)
    return Segments(output, m, source, weight, mean=kind == "mean")


def looped(x: Tensor, segments: Segments) -> Tensor:
    """One entry after another, in float64."""
    total = torch.zeros(segments.m, x.shape[-1], dtype=torch.float64)
    counts = [0] * segments.m
    for k, m in enumerate(segments.output.tolist()):
        if m < 0:
            continue
        source = k if segments.source is None else int(segments.source[k])
        weight = 1.0 if segments.weight is None else float(segments.weight[k])
        total[m] += weight * x[source].double()
        counts[m] += 1
    for m, count in enumerate(counts):
        total[m] /= max(count, 1) if segments.mean else 1
    return total


@settings(max_examples=60)
@given(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.integers(1, 12),
    st.integers(1, 9),
    st.sampled_from(["mean", "sum", "mix"]),
)
def test_all_ways_are_the_loop(seed: int, n: int, m: int, width: int, kind: str) -> None:
    segments = drawn((), n, m, kind, seed)
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(seed))
    expected = looped(x, segments)
    torch.testing.assert_close(segment_merge_reference(x, segments), expected)
    torch.testing.assert_close(segment_merge(x, segments).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(add_rows(x.double(), segments), expected)


@pytest.mark.parametrize("kind", ["mean", "sum", "mix"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_blocks_change_no_bit(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments = drawn((2, 3), 50, 20, kind, 1)
    x = torch.randn(2, 50, 3, 8).to(dtype).transpose(1, 2)
    whole = add_rows(x, segments)
    assert whole.dtype == dtype
    monkeypatch.setattr(core, "_BLOCK", 8 * 7)
    assert add_rows(x, segments).equal(whole)
    torch.testing.assert_close(
        whole.double(), segment_merge_reference(x, segments), rtol=1e-2, atol=1e-2
    )


def test_a_batch_is_its_items_and_dropped_sources_do_not_count() -> None:
    segments = drawn((3,), 40, 9, "mean", 2)
    x = torch.randn(3, 40, 5)
    x[segments.output < 0] = torch.nan
    together = segment_merge(x, segments)
    assert torch.isfinite(together).all()
    for item in range(3):
        alone = Segments(segments.output[item], 9, mean=True)
        assert segment_merge(x[item], alone).equal(together[item])


def test_a_lone_token_stays_as_it_is() -> None:
    owner = torch.tensor([0, 1, 1, 2, -1])
    x = torch.randn(5, 33)
    for dtype in (torch.float32, torch.bfloat16):
        merged = segment_merge(x.to(dtype), Segments(owner, 4, mean=True))
        assert merged[0].equal(x[0].to(dtype)) and merged[2].equal(x[3].to(dtype))
        assert not merged[3].any()


def test_gradients_reach_the_sources() -> None:
    x = torch.randn(2, 12, 3, requires_grad=True, dtype=torch.float64)
    for kind in ("mean", "sum", "mix"):
        segments = drawn((2,), 12, 5, kind, 3)
        assert torch.autograd.gradcheck(lambda rows, s=segments: segment_merge(rows, s), x)


def test_entries_are_sorted_once() -> None:
    segments = drawn((2,), 30, 7, "mix", 4)
    ordered = segments.ordered
    assert segments.ordered is ordered
    for item in range(2):
        for m in range(7):
            part = slice(*ordered.offsets[item, m : m + 2].tolist())
            mine = (segments.output[item] == m).nonzero()[:, 0]
            assert ordered.source[item, part].tolist() == segments.source[item, mine].tolist()
            assert ordered.weight[item, part].tolist() == segments.weight[item, mine].tolist()


def test_reduction_hands_its_merge_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU nothing of it is imported; elsewhere the op is found by name."""
    seen = []
    monkeypatch.setattr(core, "ACCELERATED", {"cpu": "mmfast.ops.merging"})
    monkeypatch.setattr(
        "mmfast.ops.merging.add_rows", lambda x, s: seen.append(s) or add_rows(x, s)
    )
    x, keep = torch.randn(6, 4), torch.tensor([0, 3])
    owner = torch.tensor([0, 0, -1, 1, 1, 1])
    mix = Mix(torch.tensor([0, 1, 1]), torch.tensor([0, 3, 1]), torch.tensor([1.0, 0.5, 0.5]))
    for reduction in (
        Reduction(keep, owner),
        Reduction(keep, owner, torch.rand(6)),
        Reduction(keep, owner, mix=mix),
    ):
        out = reduction.apply(x)
        assert seen.pop() is reduction.segments and not seen
        expected = looped(x, reduction.segments)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    Reduction.prune(keep, 6).apply(x)
    assert not seen


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operation made; views make none."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.numbers = max(self.numbers, out.numel())
        return out


def test_wide_tokens_are_merged_in_blocks() -> None:
    """Weighted rows as a whole would be written to memory and read again."""
    x, weight = torch.randn(4096, 2048), torch.rand(4096)
    owner = torch.arange(4096) % 1024
    segments = Segments(owner, 1024, weight=weight)

    def plain() -> Tensor:
        rows = x.index_select(0, torch.arange(4096)) * weight[:, None]
        return torch.zeros(1024, 2048).index_add_(0, owner, rows)

    assert plain().equal(segment_merge(x, segments))
    with Largest() as whole:
        plain()
    with Largest() as blocks:
        segment_merge(x, segments)
    assert whole.numbers == x.numel()
    assert blocks.numbers == 1024 * 2048


# What stands outside of a tensor, in dropped sources and in fresh memory is NaN here.
GATE = """
import sys, types
import torch
from mmfast.core import reduction as core
from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction, Segments
from mmfast.ops import merging as ops

if not hasattr(torch, "plain_empty"):
    torch.plain_empty = torch.empty
def poisoned(*shape, **kwargs):
    out = torch.plain_empty(*shape, **kwargs)
    return out.fill_(torch.nan) if out.is_floating_point() else out
torch.empty = poisoned

def entries(lead, n, m, kind):
    count = 2 * n + 1 if kind == "mix" else n
    output = torch.randint(m, (*lead, count))
    output[torch.rand(*lead, count) < 0.2] = -1
    source = torch.randint(n, (*lead, count)) if kind == "mix" else None
    weight = None if kind == "mean" else torch.randn(*lead, count)
    return Segments(output, m, source, weight, mean=kind == "mean")

def check(lead, n, m, width, kind, dtype):
    segments = entries(lead, n, m, kind)
    around = torch.full((*lead, n + 2, width + 3), torch.nan)
    around[..., 1 : n + 1, :width] = torch.randn(*lead, n, width)
    if kind != "mix":
        around[..., 1 : n + 1, :][segments.output < 0] = torch.nan
    x = around.to(dtype)[..., 1 : n + 1, :width]
    out = ops._on_device(x, segments)
    assert out.shape == (*lead, m, width) and out.dtype == dtype
    clean = x.nan_to_num() if kind != "mix" else x
    expected = ops.segment_merge_reference(clean, segments)
    # The interpreter cuts bfloat16 off instead of rounding it.
    rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    close = torch.allclose(out.double(), expected, rtol=rtol, atol=rtol)
    assert close, (lead, n, m, width, kind, dtype)
    assert ops._on_device(x, segments).equal(out)
    if lead:
        weight = None if segments.weight is None else segments.weight[0]
        source = None if segments.source is None else segments.source[0]
        first = Segments(segments.output[0], m, source, weight, segments.mean)
        assert ops._on_device(x[0], first).equal(out[0])

torch.manual_seed(0)
single, half, brain = torch.float32, torch.float16, torch.bfloat16
check((), 1, 1, 1, "mean", single)
check((), 7, 3, 5, "mean", single)
check((), 40, 2, 33, "sum", single)
check((2,), 23, 5, 130, "mean", brain)
check((2,), 23, 5, 130, "sum", brain)
check((3,), 9, 4, 17, "mix", half)
check((2, 2), 11, 9, 3, "mix", single)
check((), 6, 3, 700, "mean", single)
check((), 5, 2, 1100, "sum", brain)
check((), 3, 6, 8, "mean", half)

# And as Reduction.apply finds it.
module = types.ModuleType("gate_ops")
module.segment_merge = ops._on_device
sys.modules["gate_ops"] = module
core.ACCELERATED = {"cpu": "gate_ops"}
keep, target = torch.tensor([0, 3, 4]), torch.tensor([0, 0, -1, 3, 4, 3, 3, 0])
x = torch.randn(8, 20)
merged = Reduction.merge(keep, target).apply(x)
expected = torch.stack([x[target == k].double().mean(0) for k in keep])
assert torch.allclose(merged.double(), expected, atol=1e-6)
assert merged[2].equal(x[4])
core.ACCELERATED = {}
print("same sums")
"""

KINDS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}


def _job(kind: str, capability: int, average: int, weighted: bool, width: int) -> dict[str, object]:
    from mmfast.kernels.segment_merge import config

    pointers = {"x_ptr": KINDS[kind], "out_ptr": KINDS[kind], "weight_ptr": "*fp32"}
    pointers |= {"offsets_ptr": "*i32", "source_ptr": "*i32"}
    counts = dict.fromkeys(["outputs", "entries", "width"], "i32")
    strides = dict.fromkeys(["item_stride", "row_stride"], "i64")
    shape = config(width, average * 512, 512, 4 if kind == "fp32" else 2)
    return {
        "fn": "_merge",
        "signature": pointers | counts | strides,
        "capability": capability,
        "num_warps": shape.pop("num_warps"),
        "constexprs": {"weighted": weighted, "mean": not weighted, **shape},
        "aligned": [*pointers, *strides, "width"],
    }


@pytest.mark.slow
def test_interpreter_agrees_with_the_reference() -> None:
    assert "same sums" in interpreted(GATE)


def test_planted_bugs_are_caught() -> None:
    # None of them reads outside of the tensors: that would end the process instead of a test.
    planted(
        "segment_merge",
        GATE,
        ("here = entry < stop", "here = entry < stop - 1"),
        ("inside = column < width", "inside = column < width - 1"),
        ("total += tl.sum(value, axis=0)", "total -= tl.sum(value, axis=0)"),
        ("value = value * weight[:, None]", "value = value"),
        ("        entry += rows\n", "        entry += rows - 1\n"),
        ("tl.maximum(stop - start, 1)", "tl.maximum(stop - start, 2)"),
        ("item.to(tl.int64) * item_stride", "item.to(tl.int64) * 0"),
        ("item.to(tl.int64) * (outputs + 1)", "item.to(tl.int64) * outputs"),
        ("other=0).to(tl.float32)", "other=0)"),  # adds bfloat16
    )


@pytest.mark.slow
def test_compiles_for_every_chip() -> None:
    # Short and long segments, weights and means, hidden states and the keys of one head.
    wanted = [("bf16", 4, True, 3584), ("fp32", 40, False, 3584), ("fp16", 4, True, 128)]
    jobs = [_job(k, c, *shape) for k, *shape in wanted for c in CAPABILITIES]
    for binary in compiled("segment_merge", jobs):
        assert_clean(binary)
        assert has_wide_loads(binary), binary.label
        assert "STG.E.128" in binary.sass, binary.label
        assert not binary.shared and "RED." not in binary.sass and "ATOM" not in binary.sass
        assert binary.registers <= 96, binary.label


def test_bad_arguments_are_refused() -> None:
    from mmfast.kernels.segment_merge import segment_merge as kernel

    x, offsets = torch.zeros(2, 5, 8), torch.zeros(2, 4, dtype=torch.int32)
    source = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="float64"):
        kernel(x.double(), offsets, source, None, mean=True)
    with pytest.raises(ValueError, match="adjacent columns"):
        kernel(x.transpose(1, 2), offsets, source, None, mean=True)
    with pytest.raises(ValueError, match="int32"):
        kernel(x, offsets.long(), source, None, mean=True)
    with pytest.raises(ValueError, match="items"):
        kernel(x[:1], offsets, source, None, mean=True)
    with pytest.raises(ValueError, match="contiguous"):
        kernel(x, offsets[:, ::2], source, None, mean=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mean", "sum", "mix"])
def test_device_merges_as_the_formula_says(kind: str, dtype: torch.dtype) -> None:
    for lead, n, m, width in [((), 6272, 1568, 3584), ((3,), 999, 77, 130), ((2, 4), 64, 9, 128)]:
        mine = drawn(lead, n, m, kind, n)
        x = torch.randn(*lead, n, width).to(dtype)
        there = Segments(
            mine.output.cuda(),
            m,
            None if mine.source is None else mine.source.cuda(),
            None if mine.weight is None else mine.weight.cuda(),
            mine.mean,
        )
        out = segment_merge(x.cuda(), there)
        for _ in range(5):
            assert segment_merge(x.cuda(), there).equal(out)
        rtol = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        expected = segment_merge_reference(x, mine)
        torch.testing.assert_close(out.cpu().double(), expected, rtol=rtol, atol=rtol)


def test_bench_has_a_row_for_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast.bench.suites import kernels as bench

    monkeypatch.setattr(bench, "ROUNDS", 2)
    tiny = bench.MergeCase("tiny", 2, 20, 5, 8, weighted=True)
    monkeypatch.setitem(bench.MERGES, "cpu", (tiny,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = bench.segment_merges(lambda *_: None)
    assert [row["way"] for row in found] == ["ours", "index_add_ float32", "formula float64"]
    assert all(row["median_ms"] > 0 and row["device"] == "cpu" for row in found)
    assert found[0]["repeatable"] and found[0]["max_error"] < 1e-5

    monkeypatch.setattr(bench, "segment_merge", lambda x, s: 1.001 * segment_merge(x, s))
    with pytest.raises(MmfastError, match="no speed is measured"):
        bench.segment_merges(lambda *_: None)
