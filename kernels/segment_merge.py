"""Triton kernel of weighted means and sums of rows over segments, without atomics.

Atomics round in another order at every run, and in bfloat16 at every addition. Here one program
makes one output row (or a part of a wide one): it walks over the entries of its segment, several
rows at a time, and adds in float32. Every row is read once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Most programs in the first dimension of a launch.
_MAX_PROGRAMS = 2**31 - 1


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    x_ptr,
    offsets_ptr,
    source_ptr,
    weight_ptr,
    out_ptr,
    outputs,
    entries,
    width,
    item_stride,
    row_stride,
    weighted: tl.constexpr,
    mean: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
):
    tiles = tl.cdiv(width, block)
    row = tl.program_id(0) // tiles  # parts of a row are neighbours, as in memory
    item = row // outputs
    column = (tl.program_id(0) % tiles) * block + tl.arange(0, block)
    inside = column < width
    bound = offsets_ptr + item.to(tl.int64) * (outputs + 1) + row % outputs
    start = tl.load(bound)
    stop = tl.load(bound + 1)
    listed = item.to(tl.int64) * entries
    base = x_ptr + item.to(tl.int64) * item_stride
    total = tl.zeros((block,), dtype=tl.float32)
    entry = start + tl.arange(0, rows)
    source = tl.load(source_ptr + listed + entry, mask=entry < stop, other=0)
    for _ in range(start, stop, rows):
        here = entry < stop
        at = base + source.to(tl.int64)[:, None] * row_stride + column[None, :]
        value = tl.load(at, mask=here[:, None] & inside[None, :], other=0).to(tl.float32)
        if weighted:
            weight = tl.load(weight_ptr + listed + entry, mask=here, other=0)
            value = value * weight[:, None]
        entry += rows
        # The next rows are known before these have arrived.
        source = tl.load(source_ptr + listed + entry, mask=entry < stop, other=0)
        total += tl.sum(value, axis=0)
    if mean:
        total = total / tl.maximum(stop - start, 1).to(tl.float32)
    out_row = out_ptr + row.to(tl.int64) * width
    tl.store(out_row + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def segment_merge(
    x: Tensor, offsets: Tensor, source: Tensor, weight: Tensor | None, *, mean: bool
) -> Tensor:
    """Add up rows of `x`, segment by segment: `[B, M, D]`, the same bits at every run.

    `x` is `[B, N, D]` float32, float16 or bfloat16, the columns of a row next to each other.
    Entries `offsets[m]` to `offsets[m + 1]` (`[B, M + 1]` int32) make up output m, 0 where there is
    none; each reads the row `source` `[B, K]` int32 with `weight` `[B, K]` float32 (None is 1).
    `mean` divides by their number. A ValueError says that a shape, dtype or stride does not fit.
    """
    _check(x, offsets, source, weight)
    items, _, width = x.shape
    outputs, entries = offsets.shape[1] - 1, source.shape[1]
    out = torch.empty(items, outputs, width, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    shape = config(width, entries, outputs, x.element_size())
    programs = items * outputs * triton.cdiv(width, shape["block"])
    if programs > _MAX_PROGRAMS:
        raise ValueError(
            f"segment_merge got {items} x {outputs} outputs of {width}; merge in parts"
        )
    _merge[(programs,)](
        x,
        offsets,
        source,
        source if weight is None else weight,  # never read without weights
        out,
        outputs,
        entries,
        width,
        x.stride(0),
        x.stride(1),
        weighted=weight is not None,
        mean=mean,
        **shape,
    )
    return out


def config(width: int, entries: int, outputs: int, bytes_each: int) -> dict[str, int]:
    """Tile and warps for rows of `width` numbers and the mean length of segments.

    A thread reads 16 bytes of each of `rows` rows: few for short segments, many for long ones.
    """
    block = min(max(triton.next_power_of_2(width), 512 // bytes_each), 2048 // bytes_each)
    rows = 8 if entries <= 16 * outputs else 16
    return {"block": block, "rows": rows, "num_warps": block * bytes_each // 512}


def _check(x: Tensor, offsets: Tensor, source: Tensor, weight: Tensor | None) -> None:
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16) or x.stride(-1) != 1:
        raise ValueError(
            f"segment_merge got {x.dtype} with strides {x.stride()}; give float32, float16 or "
            "bfloat16 with adjacent columns"
        )
    items = (len(x), len(offsets), len(source), len(source if weight is None else weight))
    if len(set(items)) > 1 or (weight is not None and weight.shape != source.shape):
        raise ValueError(f"segment_merge got {items} items of x, offsets, source and weight")
    if {offsets.dtype, source.dtype} != {torch.int32} or (
        weight is not None and weight.dtype != torch.float32
    ):
        raise ValueError("segment_merge takes int32 offsets and sources, and float32 weights")
    if not all(t.is_contiguous() for t in (offsets, source, weight) if t is not None):
        raise ValueError("segment_merge takes contiguous offsets, sources and weights")
