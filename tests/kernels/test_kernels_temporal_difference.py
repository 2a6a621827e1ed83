"""Differences of patches over time: formulas, the host's path, the kernel on every gate."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import (
    CAPABILITIES,
    assert_clean,
    compiled,
    edited,
    has_wide_loads,
    planted,
)

from mmfast.bench.timing import peak_during
from mmfast.core.errors import MmfastError
from mmfast.core.spec import reduce
from mmfast.core.tokens import Tokens
from mmfast.ops import temporal_difference as op
from mmfast.ops.similarity import paired_cosine
from mmfast.ops.video import temporal_cosine

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES: list[tuple[tuple[int, int, int], list[int] | None]] = [
    ((5, 3, 7), [5]),
    ((1, 2, 3), None),
    ((9, 13, 33), [2, 0, 3, 4]),
    ((130, 3, 5), None),
    ((0, 3, 4), None),
    ((4, 0, 3), [4]),
]

# The kernel against the formulas in float64, on outputs and surroundings full of NaN.
GATE = """
import torch
from mmfast.kernels import temporal_difference as kernel
from mmfast.ops.temporal_difference import reference
from mmfast.ops.temporal_difference import static_runs as runs_by_torch

def poisoned(*size, **kinds):
    return torch.full(size, torch.nan, **kinds) if kinds["dtype"].is_floating_point else real(
        *size, **kinds).fill_(-7)
real, torch.empty = torch.empty, poisoned
torch.empty_like = lambda x: torch.full_like(x, torch.nan)

def check(frames, n, d, dtype, lengths, cut=None, chunk=None):
    # A view inside a larger buffer of NaN: what is read outside shows in every sum.
    around = torch.full((frames + 2, n + 3, d + 5), torch.nan, dtype=dtype)
    x = around[1 : frames + 1, 2 : n + 2, 3 : d + 3]
    x.copy_(torch.randn(frames, n, d))
    if frames > 2:
        x[1, 0] = x[0, 0]  # does not change
        x[2, n - 1] = 0.0
    shape, chunks = kernel.shape, kernel.chunk_frames
    kernel.shape = lambda width: cut or shape(width)
    kernel.chunk_frames = lambda *work: chunk or chunks(*work)
    for l1 in (True, False):
        cosine, change, norm = kernel.temporal_difference(x, lengths, l1)
        expected = reference(x.double(), lengths)
        torch.testing.assert_close(cosine, expected.cosine, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(norm.double(), expected.norm, rtol=1e-6, atol=1e-6)
        assert (change is None) is (not l1)
        if l1:
            torch.testing.assert_close(change.double(), expected.l1, rtol=1e-6, atol=1e-6)
    if frames > 2 and lengths[0] > 2:
        assert cosine[1, 0] == 1.0 and cosine[2, n - 1] == 0.0
    kernel.shape, kernel.chunk_frames = shape, chunks

torch.manual_seed(0)
small = kernel.TileShape(rows=2, block=32, warps=4, stages=3)
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    check(6, 5, 19, dtype, [6], small, chunk=2)
    check(7, 3, 32, dtype, [3, 0, 4], small, chunk=3)
check(1, 1, 1, torch.float32, [1])
check(4, 2, 2, torch.float32, [2, 2], small, chunk=4)
check(3, 7, 600, torch.float16, [3])
check(3, 2, 1030, torch.bfloat16, [3])

kernel._RUNS = (4, 2)
for frames, n in [(1, 1), (4, 2), (11, 5)]:
    static = torch.rand(frames, n) > 0.3
    static[:, 0] = True
    assert kernel.static_runs(static).equal(runs_by_torch(static)), (frames, n)
print("same differences")
"""

# One bug of each kind: mask, sign, edge of a chunk, wrong neighbour, dropped state, wrong frame.
BUGS = [
    ("(columns < d)[None, :]", "(columns <= d)[None, :]"),
    ("exists = spots < n", "exists = spots < n - 1"),
    ("tl.abs(now - last)", "tl.abs(now + last)"),
    ("tl.maximum(begin - 1, 0)", "tl.maximum(begin, 0)"),
    ("last_square = square\n", "last_square = last_square\n"),
    ("frame % period == 0", "frame == 0"),
    ("tl.load(opens_ptr + frame) != 0", "tl.load(opens_ptr + frame) == 2"),
    ("end = tl.minimum(begin + chunk, frames)", "end = tl.minimum(begin + chunk, frames - 1)"),
    ("/ tl.where(scale > 0, scale, 1.0), 0.0)", "/ tl.where(scale > 0, scale, 1.0), 1.0)"),
    ("changed = tl.max(latest, axis=0)", "changed = tl.min(latest, axis=0)"),
]

POINTERS = {"x_ptr": "*bf16", "opens_ptr": "*u8", "cosine_ptr": "*fp64"}
SIGNATURE = POINTERS | {"l1_ptr": "*fp32", "norm_ptr": "*fp32"}
SIGNATURE |= dict.fromkeys(["frames", "n", "d", "period", "chunk"], "i32")
SIGNATURE |= dict.fromkeys(["frame_stride", "row_stride"], "i64")
ALIGNED = ["x_ptr", "cosine_ptr", "l1_ptr", "norm_ptr", "frame_stride", "row_stride", "d"]


def job(capability: int, width: int, dtype: str = "bf16", l1: bool = False) -> dict[str, object]:
    from mmfast.kernels.temporal_difference import shape

    cut = shape(width)
    sizes = {"rows": cut.rows, "block": cut.block, "stages": cut.stages}
    return {
        "fn": "_difference",
        "signature": SIGNATURE | {"x_ptr": f"*{dtype}"},
        "constexprs": {"ragged": l1, "with_l1": l1, **sizes},
        "capability": capability,
        "num_warps": cut.warps,
        "aligned": ALIGNED,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "lengths"), SHAPES)
def test_host_agrees_with_the_formulas_in_float64(
    shape: tuple[int, int, int],
    lengths: list[int] | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = op.reference(x.double(), lengths)
    within = 1e-12 if dtype == torch.float64 else 2e-6
    for chunk in (op._CHUNK, 40):
        monkeypatch.setattr(op, "_CHUNK", chunk)
        found = [op.temporal_difference(x, lengths), op.reference(x, lengths)]
        found += [op._in_chunks(x, lengths or [len(x)], True)] if x.numel() else []
        for parts in found:
            for part, other in zip(parts, expected, strict=True):
                assert part.dtype == (other.dtype if part is parts.cosine else wide(dtype))
                torch.testing.assert_close(part.double(), other, rtol=within, atol=within)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def test_float64_reference_is_the_definition() -> None:
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1)).double()
    found = op.reference(x, [2, 2])
    for frame in range(4):
        for place in range(3):
            now, before = x[frame, place].tolist(), x[frame - 1, place].tolist()
            norm, other = (sum(v * v for v in row) ** 0.5 for row in (now, before))
            dot = sum(a * b for a, b in zip(now, before, strict=True))
            l1 = sum(abs(a - b) for a, b in zip(now, before, strict=True)) / 5
            new = frame % 2 == 0
            at = (frame, place)
            assert float(found.norm[at]) == pytest.approx(norm, rel=1e-12)
            assert float(found.cosine[at]) == pytest.approx(
                float("-inf") if new else dot / norm / other, rel=1e-12
            )
            assert found.l1 is not None
            assert float(found.l1[at]) == pytest.approx(float("inf") if new else l1, rel=1e-12)


@settings(max_examples=60)
@given(
    d=st.integers(1, 700),
    offset=st.integers(0, 40),
    gap=st.integers(0, 9),
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(DTYPES),
)
def test_equal_rows_have_cosine_exactly_one_wherever_they_lie(
    d: int, offset: int, gap: int, seed: int, dtype: torch.dtype
) -> None:
    """Ties are true ties: neither the alignment nor the gap between rows changes a bit."""
    row = torch.randn(d, generator=torch.Generator().manual_seed(seed)).to(dtype)
    buffer = torch.zeros(offset + 3 * 2 * (d + gap), dtype=dtype)[offset:]
    clip = buffer.view(3, 2, d + gap)[..., :d]
    clip[:] = row
    zero = not bool(row.any())
    assert (op.temporal_difference(clip).cosine[1:] == (0.0 if zero else 1.0)).all()
    change = op.temporal_difference(clip).l1
    assert change is not None and not change[1:].any()
    alone = torch.empty(d, dtype=dtype).copy_(row)
    assert (paired_cosine(clip[0, 1], alone) == (0.0 if zero else 1.0)).all()


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    n=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
def test_clips_together_are_clips_alone(lengths: list[int], n: int, seed: int) -> None:
    x = torch.randn(sum(lengths), n, 6, generator=torch.Generator().manual_seed(seed))
    together = op.temporal_difference(x, lengths)
    alone = [op.temporal_difference(clip) for clip in x.split(lengths)]
    for part, parts in zip(together, zip(*alone, strict=True), strict=True):
        assert part.equal(torch.cat(parts))
    static = together.cosine > 0.0
    assert op.static_runs(static).equal(
        torch.cat([op.static_runs(part.cosine > 0.0) for part in alone])
    )


@settings(max_examples=40)
@given(frames=st.integers(0, 12), n=st.integers(0, 4), seed=st.integers(0, 2**20))
def test_runs_are_counted_frame_by_frame(frames: int, n: int, seed: int) -> None:
    static = torch.rand(frames, n, generator=torch.Generator().manual_seed(seed)) > 0.4
    runs = op.static_runs(static)
    assert runs.dtype == torch.int32 and runs.shape == static.shape
    for place in range(n):
        length = 0
        for frame in range(frames):
            length = length + 1 if static[frame, place] else 0
            assert int(runs[frame, place]) == length


def test_batches_of_clips_are_compared_within_each() -> None:
    x = torch.randn(2, 3, 4 * 5, 6, generator=torch.Generator().manual_seed(2))
    found = temporal_cosine(x, 4)
    assert found.shape == (2, 3, 3, 5) and found.dtype == torch.float64
    for a in range(2):
        for b in range(3):
            assert found[a, b].equal(temporal_cosine(x[a, b], 4))
    sideways = x.transpose(-1, -2).contiguous().transpose(-1, -2)
    torch.testing.assert_close(temporal_cosine(sideways, 4), found, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
@pytest.mark.parametrize("method", ["evs", "dycoke", "holitom"])
def test_temporal_methods_need_little_beside_the_clip(method: str) -> None:
    """No temporary is nearly as large as the clip."""
    x = torch.randn(32, 144, 1024, generator=torch.Generator().manual_seed(4))
    tokens = Tokens(x.flatten(0, 1), attn=torch.rand(32 * 144), grid=(32, 12, 12))
    reduce(tokens, f"{method}:0.25")  # libraries take memory of their own on first use
    nothing = peak_during(lambda: None)
    extra = peak_during(lambda: reduce(tokens, f"{method}:0.25")) - nothing
    assert extra < 0.3 * x.nbytes / 1e6, (extra, x.nbytes / 1e6)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_the_textbook_needs_far_more() -> None:
    x = torch.randn(32, 144, 1024, generator=torch.Generator().manual_seed(4))
    nothing = peak_during(lambda: None)
    assert peak_during(lambda: op.reference(x)) - nothing > 1.5 * x.nbytes / 1e6


def test_lengths_have_to_add_up() -> None:
    for lengths in ([3], [2, 3], [5, -1]):
        with pytest.raises(MmfastError, match="add up"):
            op.temporal_difference(torch.zeros(4, 2, 2), lengths)


def test_kernel_refuses_what_it_cannot_do() -> None:
    from mmfast.kernels import temporal_difference as kernel

    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="float64"):
        kernel.temporal_difference(x.double(), [4])
    with pytest.raises(ValueError, match="8192"):
        kernel.temporal_difference(torch.zeros(1, 1, 8193), [1])
    for wrong, lengths in [(x, [3]), (x.transpose(1, 2), [4]), (x[:, :0], [4])]:
        with pytest.raises(ValueError, match="give"):
            kernel.temporal_difference(wrong, lengths)


@pytest.mark.slow
def test_interpreter_agrees_and_planted_bugs_do_not() -> None:
    planted("temporal_difference", GATE, *BUGS)


def test_bfloat16_arithmetic_in_the_kernel_would_be_caught() -> None:
    code = """
import torch
from mmfast.kernels.temporal_difference import temporal_difference
temporal_difference(torch.ones(2, 1, 4, dtype=torch.bfloat16), [2], False)
"""
    old = "now = tl.load(tile + place * frame_stride, mask=inside, other=0.0).to(tl.float32)"
    bug = (old, old.removesuffix(".to(tl.float32)"))
    planted("temporal_difference", code, bug, because="bfloat16 reached arithmetic")


@pytest.mark.slow
def test_machine_code_reads_wide_and_spills_nothing() -> None:
    jobs = [job(capability, 3584) for capability in CAPABILITIES]
    jobs += [job(capability, 3584, l1=True) for capability in (90, 100)]
    jobs += [job(90, 1152, l1=True), job(90, 64), job(90, 8192, "fp32", l1=True)]
    for binary in compiled("temporal_difference", jobs):
        assert_clean(binary)
        assert has_wide_loads(binary), binary.label
        # 16 bytes at a time, and asynchronously: the next frames are on their way meanwhile.
        assert re.search(r"LDGSTS\.E(\.\w+)*\.128", binary.sass), binary.label
        assert binary.registers <= 128, (binary.label, binary.registers)


@pytest.mark.slow
def test_what_a_launch_makes_of_missing_and_single_things_compiles() -> None:
    """A launch turns None and 1 into constants of the program."""
    ones = dict.fromkeys(["frames", "n", "d", "period", "frame_stride", "row_stride"], 1)
    single = job(90, 1)
    single["constexprs"] |= ones | {"opens_ptr": None, "l1_ptr": None}  # type: ignore[operator]
    single["aligned"] = ["x_ptr", "cosine_ptr", "norm_ptr", "chunk"]
    runs = [
        {
            "fn": "_runs",
            "signature": {"static_ptr": "*u8", "runs_ptr": "*i32", "frames": "i32", "n": "i32"},
            "constexprs": {"block": 64, "rows": 32},
            "capability": capability,
        }
        for capability in (80, 90, 100)
    ]
    for binary in compiled("temporal_difference", [single, *runs]):
        assert_clean(binary)


def test_gates_on_machine_code_fail_on_planted_bugs(tmp_path: Path) -> None:
    name = "temporal_difference"
    gaps = edited(
        name, "columns = tl.arange(0, block)", "columns = tl.arange(0, block) * 2", tmp_path
    )
    waits = edited(name, "num_stages=stages)", "num_stages=1)", tmp_path)
    narrow, late = compiled(name, [job(90, 3584) | {"file": file} for file in (gaps, waits)])
    assert not has_wide_loads(narrow)
    assert "LDGSTS" not in late.sass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "lengths"),
    [
        ((32, 196, 3584), None),
        ((40, 30, 1152), [7, 1, 32]),
        ((9, 5, 65), None),
        ((3, 2, 9000), None),
    ],
)
def test_device_agrees_with_the_host(
    shape: tuple[int, int, int], lengths: list[int] | None, dtype: torch.dtype
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    x[1] = x[0]
    found = op.temporal_difference(x.cuda(), lengths)
    expected = op.temporal_difference(x.double(), lengths)
    for part, other in zip(found, expected, strict=True):
        torch.testing.assert_close(part.cpu().double(), other, rtol=2e-6, atol=2e-6)
    assert (found.cosine[1] == 1.0).all()  # exactly
    static = found.cosine > 0.0
    assert op.static_runs(static).cpu().equal(op.static_runs(static.cpu()))
