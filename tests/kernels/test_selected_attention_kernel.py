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
    planted,
)
from oracles_ops import selected_attention_reference as reference

from mmfast.ops.pages import selected_attention

pytest.importorskip("triton", reason="triton has wheels for Linux on x86-64 only")
from mmfast.kernels import selected_attention as kernel

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
    "the last query of a head": ("mine, asker = row < group,", "mine, asker = row < group - 1,"),
    "fillers are read": ("mask=here, other=0) != 0)", "mask=here, other=0) >= 0)"),
    "the last entry": ("here = entry < end", "here = entry <= end"),
    "the place of a bias": ("b_head + place[None, :]", "b_head + entry[None, :]"),
    "the mass of earlier tiles": ("mass * fade + tl.sum(shares", "mass + tl.sum(shares"),
    "the sums of earlier tiles": ("total * fade[:, None] + found", "total + found"),
    "rows without entries": (
        "tl.where(higher == -float(\"inf\"), 0.0, higher)  # nothing", "higher  # nothing"
    ),
    "rows without any entry": ("tl.where(mass > 0, mass, 1.0)[:, None]", "mass[:, None]"),
    "the width of a value": ("v_row * unit, v_width", "v_row * unit, width"),
    "the width of a head": ("(column < width)[None", "(column <= width)[None"),
    "the level of a part": ("share = tl.exp2((level - base)", "share = tl.exp2((base - base)"),
    "earlier parts": ("total * fade + tl.sum(tile", "total + tl.sum(tile"),
    "parts without entries": (
        "base = tl.where(higher == -float(\"inf\"), 0.0, higher)", "base = higher"
    ),
    "where a part is": ("* tl.num_programs(0) + part", "* tl.num_programs(0)"),
}  # fmt: skip


@pytest.mark.slow
def test_interpreter_agrees_with_the_formula_and_planted_bugs_do_not() -> None:
    planted(KERNEL, GATE, *BUGS.values())


SHAPES = (("bf16", 64), ("bf16", 128), ("fp16", 256), ("fp32", 64), ("fp32", 128))


def jobs() -> list[dict[str, Any]]:
    """Launches on a cache of the 0.5B shape and of a wider model, for both chips."""
    found = []
    for capability in CAPABILITIES:
        for kind, width in (
            ("bf16", 64),
            ("bf16", 128),
            ("fp16", 256),
            ("fp32", 64),
            ("fp32", 128),
        ):
            masked, biased = width == 64, width == 128
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[kind]
            plan = kernel.tiles(dtype, width, 7)
            found.append(
                {
                    "fn": "_attend",
                    "signature": {
                        **dict.fromkeys(["query", "key", "value"], f"*{kind}"),
                        "index": "*i64",
                        "real": "*u8" if masked else "*i64",
                        "bias": f"*{kind}",
                        **dict.fromkeys(["out", "peaks", "masses"], "*fp32"),
                        "scale": "fp32",
                        **dict.fromkeys(kernel._INTEGERS, "i32"),
                    },
                    "constexprs": {
                        "masked": masked,
                        "biased": biased,
                        "split": True,
                        "upcast": False,
                        "held": plan.held,
                        "step": plan.step,
                        "unit": 16 // dtype.itemsize,
                        **dict.fromkeys(["width", "padded", "v_width", "v_padded"], width),
                    },
                    "num_warps": plan.warps,
                    "num_stages": plan.stages,
                    "aligned": ["query", "key", "value", "index", "bias", "out"],
                    "capability": capability,
                }
            )
        join = {
            "fn": "_join",
            "signature": {**dict.fromkeys(["sums", "peaks", "masses"], "*fp32"),
                          "out": "*bf16", "parts": "i32"},
            "constexprs": {"block": kernel._PARTS, "width": 128, "padded": 128},
            "capability": capability,
        }  # fmt: skip
        found.append(join)
    return found


@pytest.mark.slow
def test_compiles_for_real_chips_without_spills() -> None:
    for binary in compiled(KERNEL, jobs()):
        assert_clean(binary)
        if binary.label.startswith("_attend"):
            assert has_wide_loads(binary) and has_tensor_cores(binary), binary.label


def test_bad_arguments_are_refused() -> None:
    query, keys, index = (
        torch.zeros(1, 4, 1, 8),
        torch.zeros(1, 2, 5, 8),
        torch.zeros(1, 1, 3).long(),
    )
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((query.double(), keys, keys, index), "float64"),
        ((query, keys[:, :, :, :4], keys, index), "queries"),
        ((query.expand(1, 4, 2, 8), keys, keys, index), "queries"),
        ((query[:, :3], keys, keys, index), "queries"),
        ((query, keys, keys.mT.contiguous().mT, index), "contiguous"),
        ((query, keys, keys, index.int()), "int64"),
        ((query, keys, keys, index, 1.0, torch.ones(1, 1, 2).bool()), "as many marks"),
        ((query, keys, keys, index, 1.0, None, torch.ones(1, 1, 3)), "bias for every entry"),
    ]
    for (query_, keys_, values_, index_, *more), text in wrong:
        with pytest.raises(ValueError, match=text):
            kernel.selected_attention(query_, keys_, values_, index_, *(more or [1.0]))


@pytest.mark.slow
def test_bench_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmfast import MmfastError
    from mmfast.bench.suites import kernels as bench

    monkeypatch.setattr(bench, "ROUNDS", 2)
    monkeypatch.setitem(bench.READS, "cpu", (bench.ReadCase(2, 4, 2, 60, 9, 8),))
    if not torch.cuda.is_available():
        rows = bench.selected_reads(lambda label, done, total: None)
        assert [row["way"] for row in rows] == ["ours", "copy", "all entries"]
        assert rows[1]["speedup"] == 1 and rows[0]["max_error"] < 1e-5
        assert rows[0]["case"] == "9 of 60 entries x 4 heads x 8, 2 answers"
    monkeypatch.setattr(bench, "selected_attention", lambda query, *_: query)
    with pytest.raises(MmfastError, match="is off by"):
        bench._read_rows(bench.ReadCase(1, 2, 2, 20, 3, 4), torch.float32, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [1, 100, 1638, 16_000])
def test_device_reads_what_the_host_reads(dtype: torch.dtype, count: int) -> None:
    made = torch.Generator().manual_seed(count)
    query = torch.randn(2, 14, 1, 64, generator=made).to(dtype)
    keys, values = (torch.randn(2, 2, 16_384, 64, generator=made).to(dtype) for _ in range(2))
    index = torch.rand(2, 2, 16_384, generator=made).argsort(-1)[..., :count]
    real = torch.rand(2, 2, count, generator=made) < 0.7
    bias = torch.randn(2, 14, 16_384, generator=made).to(dtype)
    for marks, added in ((None, None), (real, None), (real, bias)):
        want = reference(query, keys, values, index, marks, added, scale=0.125)
        given = [None if x is None else x.cuda() for x in (query, keys, values, index)]
        more = {"real": marks, "bias": added}
        more = {name: None if x is None else x.cuda() for name, x in more.items()}
        found = selected_attention(*given, **more, scale=0.125).cpu().double()
        error = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(found, want, atol=error, rtol=error)
