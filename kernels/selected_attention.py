"""Triton kernels of attention of one query per row to chosen entries of a cache, read in place.

Torch gathers what was chosen before attention reads the copy, which moves it three times. Here a
program holds the queries of one key head and reads a part of its entries by number, once for all of
them; a second kernel joins the parts. No atomics: the same bits every time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# A wider tile of keys and values does not fit the registers of one program.
MAX_WIDTH = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}
_PROGRAMS = 512  # as many as fill a large chip: four on each of 132 multiprocessors
_LEAST = 2  # tiles of a part; shorter ones cost more to join than they save
_PARTS = 16  # of a row that are joined at a time


class EntryTiles(NamedTuple):
    """Tiles of one program: `held` queries stay in registers, `step` entries are streamed."""

    held: int
    step: int
    warps: int
    stages: int


def tiles(dtype: torch.dtype, width: int, group: int) -> EntryTiles:
    """Tiles for a type, the wider of a key and a value, and the queries of a key head."""
    held = 16 if group <= 16 else 32  # tensor cores take 16 rows at least
    if width > 128 or dtype == torch.float32:
        return EntryTiles(held, 32, 4, 2)
    return EntryTiles(held, 32, 4, 3)


def parts_of(count: int, programs: int, step: int) -> tuple[int, int]:
    """Cut `count` entries for so many `programs` that there would be: parts, entries of each."""
    parts = min(triton.cdiv(count, _LEAST * step), triton.cdiv(_PROGRAMS, programs))
    chunk = triton.cdiv(triton.cdiv(count, parts), step) * step
    return triton.cdiv(count, chunk), chunk


@triton.jit  # type: ignore[untyped-decorator]
def _rows(  # type: ignore[no-untyped-def]
    base, place, here, stride, width: tl.constexpr, padded: tl.constexpr, upcast: tl.constexpr
):
    """Load the rows `place` as [rows, padded], zero where not `here` and past the width."""
    column = tl.arange(0, padded)
    inside = here[:, None]
    if width < padded:
        inside = inside & (column < width)[None, :]
    at = base + place.to(tl.int64)[:, None] * stride + column[None, :]
    tile = tl.load(at, mask=inside, other=0.0)
    if upcast:  # the interpreter computes with bfloat16 as if its bits were integers
        tile = tile.to(tl.float32)
    return tile


# Lengths and strides change from call to call and must not specialise the kernel.
_INTEGERS = [
    "count", "chunk", "group", "blocks", "q_item", "q_head", "k_item", "k_head", "k_row", "v_item",
    "v_head", "v_row", "i_item", "i_head", "r_item", "r_head", "b_item", "b_head",
]  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, index, real, bias, out, peaks, masses, scale, count, chunk, group, blocks,
    q_item, q_head, k_item, k_head, k_row, v_item, v_head, v_row, i_item, i_head, r_item, r_head,
    b_item, b_head,
    masked: tl.constexpr, biased: tl.constexpr, split: tl.constexpr, held: tl.constexpr,
    step: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, v_width: tl.constexpr,
    v_padded: tl.constexpr, unit: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    part, item = tl.program_id(0), tl.program_id(2).to(tl.int64)
    head = (tl.program_id(1) // blocks).to(tl.int64)
    row = tl.program_id(1) % blocks * held + tl.arange(0, held)
    mine, asker = row < group, head * group + row
    # Strides come in units of 16 bytes where they are multiples of that: wide loads need to know.
    query += item * q_item * unit
    queries = _rows(query, asker, mine, q_head * unit, width, padded, upcast)
    key += (item * k_item + head * k_head) * unit
    value += (item * v_item + head * v_head) * unit
    index += item * i_item + head * i_head
    real += item * r_item + head * r_head
    bias += item * b_item
    peak = tl.full([held], -float("inf"), tl.float32)
    mass = tl.zeros([held], dtype=tl.float32)
    total = tl.zeros([held, v_padded], dtype=tl.float32)
    end = tl.minimum(part * chunk + chunk, count)
    for first in range(part * chunk, end, step):
        entry = first + tl.arange(0, step)
        here = entry < end
        place = tl.load(index + entry, mask=here, other=0)
        if masked:
            here = here & (tl.load(real + entry, mask=here, other=0) != 0)
        keys = _rows(key, place, here, k_row * unit, width, padded, upcast)
        logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * scale  # [held, step]
        if biased:
            at = bias + asker[:, None] * b_head + place[None, :]
            logits += tl.load(at, mask=mine[:, None] & here[None, :], other=0.0).to(tl.float32)
        logits = tl.where(here[None, :], logits, -float("inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        level = tl.where(higher == -float("inf"), 0.0, higher)  # nothing was seen so far
        shares = tl.exp2((logits - level[:, None]) * 1.4426950408889634)
        fade = tl.exp2((peak - level) * 1.4426950408889634)
        mass = mass * fade + tl.sum(shares, axis=1)
        values = _rows(value, place, here, v_row * unit, v_width, v_padded, upcast)
        found = tl.dot(shares.to(values.dtype), values, input_precision="tf32x3")
        total = total * fade[:, None] + found
        peak = higher
    # [B, Hq, parts] and [B, Hq, parts, w], or the only part as [B, Hq, w]
    at = (item * tl.num_programs(1) // blocks * group + asker) * tl.num_programs(0) + part
    if split:
        tl.store(peaks + at, peak, mask=mine)
        tl.store(masses + at, mass, mask=mine)
    else:
        total = total / tl.where(mass > 0, mass, 1.0)[:, None]
    column = tl.arange(0, v_padded)
    inside = mine[:, None] & (column < v_width)[None, :]
    at = out + at[:, None] * v_width + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["parts"])  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    sums, peaks, masses, out, parts, block: tl.constexpr, width: tl.constexpr, padded: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, padded)
    peak, mass = tl.full([1], -float("inf"), tl.float32), tl.zeros([1], dtype=tl.float32)
    total = tl.zeros([padded], dtype=tl.float32)
    for first in range(0, parts, block):
        part = first + tl.arange(0, block)
        here, at = part < parts, row * parts + part
        level = tl.load(peaks + at, mask=here, other=-float("inf"))
        higher = tl.maximum(peak, tl.max(level, axis=0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        share = tl.exp2((level - base) * 1.4426950408889634)
        fade = tl.exp2((peak - base) * 1.4426950408889634)
        mass = mass * fade + tl.sum(tl.load(masses + at, mask=here, other=0.0) * share, axis=0)
        tile = _rows(sums, at, here, width, width, padded, False)
        total = total * fade + tl.sum(tile * share[:, None], axis=0)
        peak = higher
    total = total / tl.where(mass > 0, mass, 1.0)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)


def selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    scale: float,
    real: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row to the entries `index` of a cache, `[B, Hq, 1, w]`.

    `query` `[B, Hq, 1, d]`, `key` `[B, H, n, d]` and `value` `[B, H, n, w]` are of one type, with d
    and w within `MAX_WIDTH` and the numbers of a row side by side; Hq / H neighbouring query heads
    share a key head. `index` `[B, 1 or H, m]` int64 has places below n, and `real`, like it, is
    False at those that count for nothing: they are not read. `bias` `[1 or B, 1 or Hq, n]` is added
    to the logits after their factor `scale`. A query that sees nothing gets 0. A ValueError says
    that something does not fit.
    """
    _check(query, key, value, index, real, bias)
    items, heads, _, width = query.shape
    shared, v_width, count = key.shape[1], value.shape[3], index.shape[2]
    group = heads // shared
    plan = tiles(query.dtype, max(width, v_width), group)
    blocks = triton.cdiv(group, plan.held)
    parts, chunk = parts_of(count, items * shared * blocks, plan.step)
    index = _rows_of(index, items, shared)
    marks = index if real is None else _rows_of(real.view(torch.uint8), items, shared)
    added = query[:, :, 0] if bias is None else _rows_of(bias, items, heads)
    strides = _strides(query, key, value) | {f"{n}_{w}": x.stride(d) for n, x in (("i", index),
        ("r", marks), ("b", added)) for d, w in enumerate(("item", "head"))}  # fmt: skip
    out = torch.empty(items, heads, 1, v_width, dtype=query.dtype, device=query.device)
    sums, room, device = out, (2, items * heads, parts if parts > 1 else 0), query.device
    if parts > 1:
        shape = (items * heads, parts, v_width)
        sums = torch.empty(shape, dtype=torch.float32, device=device)
    peaks, masses = torch.empty(room, dtype=torch.float32, device=device)
    padded, v_padded = (max(16, triton.next_power_of_2(each)) for each in (width, v_width))
    _attend[(parts, shared * blocks, items)](
        query, key, value, index, marks, added, sums, peaks, masses, scale, count=count,
        chunk=chunk, group=group, blocks=blocks, **strides, masked=real is not None,
        biased=bias is not None, split=parts > 1, held=plan.held, step=plan.step, width=width,
        padded=padded, v_width=v_width, v_padded=v_padded,
        upcast=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    if parts > 1:
        _join[(items * heads,)](
            sums, peaks, masses, out, parts, block=_PARTS, width=v_width, padded=v_padded
        )
    return out


def _rows_of(x: Tensor, items: int, heads: int) -> Tensor:
    """Expand `[1 or B, 1 or H, n]`, the numbers of a row side by side."""
    return (x if x.stride(2) == 1 else x.contiguous()).expand(items, heads, -1)


def _strides(query: Tensor, key: Tensor, value: Tensor) -> dict[str, int]:
    """Strides of the three and their `unit`, in which they are counted."""
    found = {f"{n}_{w}": x.stride(d) for n, x in (("q", query), ("k", key), ("v", value))
             for d, w in enumerate(("item", "head", "row")) if n + w != "qrow"}  # fmt: skip
    unit = 16 // query.element_size()
    unit = 1 if any(stride % unit for stride in found.values()) else unit
    return {name: stride // unit for name, stride in found.items()} | {"unit": unit}


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    index: Tensor,
    real: Tensor | None,
    bias: Tensor | None,
) -> None:
    if query.dtype not in MAX_WIDTH or {key.dtype, value.dtype} != {query.dtype}:
        kinds = f"{query.dtype}, {key.dtype} and {value.dtype}"
        raise ValueError(f"selected_attention got {kinds}; give one of {[*MAX_WIDTH]}")
    (items, heads, length, width), (_, shared, n, _) = query.shape, key.shape
    widest = max(width, value.shape[3])
    fits = length == 1 and key.shape == (items, shared, n, width) and heads % shared == 0
    if not fits or value.shape[:3] != key.shape[:3] or widest > MAX_WIDTH[query.dtype]:
        raise ValueError(
            f"selected_attention got queries {list(query.shape)}, keys {list(key.shape)} and "
            f"values {list(value.shape)}; give [B, Hq, 1, d], [B, H, n, d], [B, H, n, w], H a "
            f"factor of Hq, d and w <= {MAX_WIDTH[query.dtype]}"
        )
    if not query.stride(3) == key.stride(3) == value.stride(3) == 1:
        raise ValueError("selected_attention needs heads that are contiguous in d and w")
    kind = index.dtype, torch.bool if real is None else real.dtype
    if kind != (torch.int64, torch.bool) or not index.numel():
        raise ValueError(f"selected_attention got {kind}; give an int64 index and a bool real")
    if (real is not None and real.shape[2] != index.shape[2]) or (
        bias is not None and bias.shape[2] != n
    ):
        raise ValueError(
            f"selected_attention got {index.shape[2]} places of {n} entries; give as many marks "
            "as places and a bias for every entry"
        )
