"""Triton kernels of the attention that every key receives, without the matrix of weights.

Given the log-sum-exp of every query, the sum over a column of the softmax needs the logits once and
no values. One program holds a block of keys of one head and walks through the queries that attend
to it, so sums stay in registers: no atomics, the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
# Wider heads do not fit the registers of one program together with their logits.
MAX_WIDTH = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 64}


@dataclass(frozen=True)
class Tiles:
    """Tiles of one program: `held` rows stay in registers, `step` rows at a time are streamed."""

    held: int
    step: int
    warps: int
    stages: int


def tiles(capability: int, dtype: torch.dtype, width: int) -> Tiles:
    """Tiles for a chip (90 = sm_90), type and width of a head; none spills on sm_80 to sm_120."""
    if dtype == torch.float32:  # three products of tf32, as exact as one of float32
        return Tiles(64, 32, 4, 2)
    if width > 128:
        return Tiles(64, 32, 4, 2)
    return Tiles(128, 64, 8 if capability // 10 == 10 else 4, 3)


@triton.jit  # type: ignore[untyped-decorator]
def _load(  # type: ignore[no-untyped-def]
    base, row_stride, first, stop, rows: tl.constexpr, width: tl.constexpr, padded: tl.constexpr,
    upcast: tl.constexpr,
):  # fmt: skip
    """Load rows from `first` on as [rows, padded], zero past `stop` and past the width."""
    row, column = tl.arange(0, rows), tl.arange(0, padded)
    inside = (row < stop - first)[:, None]
    if width < padded:
        inside = inside & (column < width)[None, :]
    at = base + first * row_stride.to(tl.int64)
    tile = tl.load(at + row[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    if upcast:  # the interpreter computes with bfloat16 as if its bits were integers
        tile = tile.to(tl.float32)
    return tile


@triton.jit  # type: ignore[untyped-decorator]
def _received(  # type: ignore[no-untyped-def]
    total, keys, query, lse, weight, row_stride, scale, offset, first_key, begin, end, stop,
    partly: tl.constexpr, weighted: tl.constexpr, held: tl.constexpr, step: tl.constexpr,
    width: tl.constexpr, padded: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    """Add to `total` [held] the attention of queries `begin` to `end` to `keys`."""
    key_place = first_key + tl.arange(0, held)
    for first in range(begin, end, step):
        queries = _load(query, row_stride, first, stop, step, width, padded, upcast)
        place = first + tl.arange(0, step)
        # Past the end the log-sum-exp is infinite, so that the exponential is exactly zero.
        level = tl.load(lse + place, mask=place < stop, other=float("inf")) * 1.4426950408889634
        logits = tl.dot(keys, tl.trans(queries), input_precision="tf32x3")  # [held, step]
        shares = tl.exp2(logits * scale - level[None, :])
        if partly:
            shares = tl.where(key_place[:, None] <= (place + offset)[None, :], shares, 0.0)
        if weighted:
            shares *= tl.load(weight + place, mask=place < stop, other=0.0)[None, :]
        total += tl.sum(shares, axis=1)
    return total


# Lengths and strides change from call to call and must not specialise the kernel.
_INTEGERS = [
    "length", "size", "begin", "end", "heads_per_key", "q_item", "q_head", "q_row", "k_item",
    "k_head", "k_row", "l_item", "l_head", "w_item", "w_head", "o_item", "o_head",
]  # fmt: skip


@triton.jit(do_not_specialize=_INTEGERS)  # type: ignore[untyped-decorator]
def _column_sums(  # type: ignore[no-untyped-def]
    query, key, lse, weight, spans, out, scale, length, size, begin, end, heads_per_key,
    q_item, q_head, q_row, k_item, k_head, k_row, l_item, l_head, w_item, w_head, o_item, o_head,
    causal: tl.constexpr, weighted: tl.constexpr, ragged: tl.constexpr, held: tl.constexpr,
    step: tl.constexpr, width: tl.constexpr, padded: tl.constexpr, unit: tl.constexpr,
    upcast: tl.constexpr,
):  # fmt: skip
    # Most queries attend to the first blocks: they are launched first.
    head, block, item = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, offset = block * held, size - length
    if ragged:  # queries and keys are the same tokens
        begin, end = tl.load(spans + item * 3 + 1), tl.load(spans + item * 3 + 2)
        item = tl.load(spans + item * 3).to(tl.int64)
        first, size, offset = begin + block * held, end, 0
    if first >= size:
        return
    # Strides come in units of 16 bytes where they are multiples of that: wide loads need to know.
    query += (item * q_item + head * q_head) * unit
    key += (item * k_item + head // heads_per_key * k_head) * unit
    lse += item * l_item + head * l_head
    weight += item * w_item + head * w_head
    keys = _load(key, k_row * unit, first, size, held, width, padded, upcast)
    total = tl.zeros([held], dtype=tl.float32)
    middle = begin
    if causal:
        begin = tl.maximum(begin, first - offset)  # earlier queries do not see the first key
        partly = tl.cdiv(tl.maximum(first + held - 1 - offset - begin, 0), step) * step
        middle = tl.minimum(begin + partly, tl.maximum(begin, end))
        total = _received(
            total, keys, query, lse, weight, q_row * unit, scale, offset, first, begin, middle,
            end, True, weighted, held, step, width, padded, upcast,
        )  # fmt: skip
    total = _received(
        total, keys, query, lse, weight, q_row * unit, scale, offset, first, middle, end,
        end, False, weighted, held, step, width, padded, upcast,
    )  # fmt: skip
    place = first + tl.arange(0, held)
    tl.store(out + item * o_item + head * o_head + place, total, mask=place < size)


@triton.jit  # type: ignore[untyped-decorator]
def _looked(  # type: ignore[no-untyped-def]
    peak, mass, queries, key, row_stride, scale, offset, first, begin, end, size,
    partly: tl.constexpr, causal: tl.constexpr, held: tl.constexpr, step: tl.constexpr,
    width: tl.constexpr, padded: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    place = first + tl.arange(0, held)
    for at in range(begin, end, step):
        keys = _load(key, row_stride, at, size, step, width, padded, upcast)
        logits = tl.dot(queries, tl.trans(keys), input_precision="tf32x3") * scale  # [held, step]
        if partly:
            key_place = at + tl.arange(0, step)
            seen = (key_place < size)[None, :]
            if causal:
                seen = seen & (key_place[None, :] <= (place + offset)[:, None])
            logits = tl.where(seen, logits, -float("inf"))
        higher = tl.maximum(peak, tl.max(logits, axis=1))
        mass = mass * tl.exp2(peak - higher) + tl.sum(tl.exp2(logits - higher[:, None]), axis=1)
        peak = higher
    return peak, mass


@triton.jit(do_not_specialize=_INTEGERS)  # type: ignore[untyped-decorator]
def _log_sum_exp(  # type: ignore[no-untyped-def]
    query, key, spans, out, scale, length, size, heads_per_key,
    q_item, q_head, q_row, k_item, k_head, k_row, o_item, o_head,
    causal: tl.constexpr, ragged: tl.constexpr, held: tl.constexpr, step: tl.constexpr,
    width: tl.constexpr, padded: tl.constexpr, unit: tl.constexpr, upcast: tl.constexpr,
):  # fmt: skip
    # The last blocks attend to most keys: they are launched first.
    head, item = tl.program_id(0), tl.program_id(2).to(tl.int64)
    block = tl.num_programs(1) - 1 - tl.program_id(1)
    begin, first, offset = 0, block * held, size - length
    if ragged:
        begin, size = tl.load(spans + item * 3 + 1), tl.load(spans + item * 3 + 2)
        item = tl.load(spans + item * 3).to(tl.int64)
        first, length, offset = begin + block * held, size, 0
    if first >= length:
        return
    query += (item * q_item + head * q_head) * unit
    key += (item * k_item + head // heads_per_key * k_head) * unit
    queries = _load(query, q_row * unit, first, length, held, width, padded, upcast)
    # Finite, so that a query that sees nothing ends at log(0) and not at inf - inf.
    peak = tl.full([held], -1e30, dtype=tl.float32)
    mass = tl.zeros([held], dtype=tl.float32)
    end, whole = size, size
    if causal:
        whole = tl.minimum(size, first + offset + 1)  # all queries of the block see these
        end = tl.minimum(size, first + held + offset)
    middle = begin + tl.maximum(whole - begin, 0) // step * step
    peak, mass = _looked(
        peak, mass, queries, key, k_row * unit, scale, offset, first, begin, middle, size,
        False, causal, held, step, width, padded, upcast,
    )  # fmt: skip
    peak, mass = _looked(
        peak, mass, queries, key, k_row * unit, scale, offset, first, middle, end, size,
        True, causal, held, step, width, padded, upcast,
    )  # fmt: skip
    place = first + tl.arange(0, held)
    level = (peak + tl.log2(mass)) * 0.6931471805599453
    tl.store(out + item * o_item + head * o_head + place, level, mask=place < length)


def attention_column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool = False,
    queries: tuple[int, int] | None = None,
    weights: Tensor | None = None,
    spans: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Sum over queries of the attention that each key receives, `[B, H, S]` float32.

    `query` `[B, H, L, D]`, of a type and D within `MAX_WIDTH`, is contiguous in D; in `key` `[B,
    Hkv, S, D]` the H / Hkv heads of a group share keys in place. `lse` `[B, H, L]` float32 is the
    log-sum-exp of the scaled logits. With `causal` query i sees the keys up to `S - L + i`.
    `queries` takes a range of them only (not with `spans`); `weights` `[B, H, L]` float32, any
    strides but 1 in L, are their factors. `spans` `[n, 3]` int32 has batch row, first token and end
    of sequences that do not overlap and attend only to themselves (L = S), `longest` at most (None:
    S) tokens long; keys outside of all get 0. A ValueError says that something does not fit.
    """
    items, heads, length, _ = query.shape
    shared, grid = _launch(query, key, scale, spans, longest or key.shape[2], key.shape[2])
    make = torch.empty if spans is None else torch.zeros
    out = make(items, heads, key.shape[2], dtype=torch.float32, device=query.device)
    (begin, end), weight = queries or (0, length), lse if weights is None else weights
    if not lse.stride(2) == weight.stride(2) == out.stride(2) == 1:
        raise ValueError("attention_column_sums needs lse and weights that are contiguous in L")
    strides = {f"{n}_{w}": x.stride(d) for n, x in (("l", lse), ("w", weight), ("o", out))
               for d, w in enumerate(("item", "head"))}  # fmt: skip
    _column_sums[grid](
        query, key, lse, weight, out if spans is None else spans, out, begin=begin, end=end,
        causal=causal, weighted=weights is not None, **strides, **shared,
    )  # fmt: skip
    return out


def log_sum_exp(
    query: Tensor,
    key: Tensor,
    scale: float,
    causal: bool = False,
    spans: Tensor | None = None,
    longest: int | None = None,
) -> Tensor:
    """Log-sum-exp of the scaled logits of every query, `[B, H, L]` float32; -inf if it sees no key.

    Arguments and errors are those of `attention_column_sums`.
    """
    shared, grid = _launch(query, key, scale, spans, longest or key.shape[2], query.shape[2])
    out = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    _log_sum_exp[grid](
        query, key, out if spans is None else spans, out, causal=causal,
        o_item=out.stride(0), o_head=out.stride(1), **shared,
    )  # fmt: skip
    return out


def _launch(
    query: Tensor, key: Tensor, scale: float, spans: Tensor | None, longest: int, rows: int
) -> tuple[dict[str, Any], tuple[int, int, int]]:
    """Return arguments of both kernels, and the grid: one program per head, block and sequence."""
    _check(query, key)
    items, heads, length, width = query.shape
    major, minor = torch.cuda.get_device_capability(query.device) if query.is_cuda else (9, 0)
    plan = tiles(major * 10 + minor, query.dtype, width)
    strides = {f"{n}_{w}": x.stride(d) for n, x in (("q", query), ("k", key))
               for d, w in enumerate(("item", "head", "row"))}  # fmt: skip
    unit = 16 // query.element_size()
    unit = 1 if any(stride % unit for stride in strides.values()) else unit
    shared = {name: stride // unit for name, stride in strides.items()} | {
        "scale": scale * LOG2_E, "length": length, "size": key.shape[2],
        "heads_per_key": heads // key.shape[1], "ragged": spans is not None,
        "held": plan.held, "step": plan.step, "width": width, "unit": unit,
        "padded": max(16, triton.next_power_of_2(width)),
        "upcast": triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
        "num_warps": plan.warps, "num_stages": plan.stages,
    }  # fmt: skip
    items, rows = (items, rows) if spans is None else (len(spans), longest)
    return shared, (heads, triton.cdiv(rows, plan.held), items)


def _check(query: Tensor, key: Tensor) -> None:
    if query.dtype not in MAX_WIDTH or key.dtype != query.dtype:
        raise ValueError(f"attention_column_sums got {query.dtype} and {key.dtype}; give one type")
    fits = query.ndim == key.ndim == 4 and query.shape[::3] == key.shape[::3]
    if not fits or query.shape[1] % key.shape[1] or query.shape[3] > MAX_WIDTH[query.dtype]:
        raise ValueError(
            f"attention_column_sums got queries {list(query.shape)} and keys {list(key.shape)}; "
            f"give [B, H, L, D], [B, Hkv, S, D], Hkv a factor of H, D <= {MAX_WIDTH[query.dtype]}"
        )
    if not query.stride(3) == key.stride(3) == 1:
        raise ValueError("attention_column_sums needs heads that are contiguous in D")
