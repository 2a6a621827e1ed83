"""Triton kernels of greedy max-min selection: the row least similar to all picks so far.

A loop in Python costs four launches a pick, about 30 ms for 1,568 picks of 6,272 tokens. Where the
matrix of similarities fits, one program per item keeps the running maximum in registers and reads
one row of the matrix a pick (`max_min_select`). Where it does not, blocks of rows that come next
are picked among themselves as long as no other row can come first (`pick_block`), and one matrix
product brings the bounds of all rows up to date (`raise_bounds`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The running maximum of one item has to fit the registers of one program.
MAX_TOKENS = 16_384

# Similarities from here on are of equal rows: such rows tie, and come last.
SAME = 1.0 - 2.0**-20

_ROW_BLOCK, _COLUMN_BLOCK = 1024, 256


@triton.jit  # type: ignore[untyped-decorator]
def _similarity(  # type: ignore[no-untyped-def]
    gram_ptr,
    scale_ptr,
    nearest_ptr,
    n,
    start,
    item_stride,
    row_stride,
    same,
    store: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    item = tl.program_id(1).to(tl.int64)
    own = tl.load(scale_ptr + item * n + start + row)
    products = gram_ptr + item * item_stride + row * row_stride
    best = tl.full([block], -float("inf"), tl.float32)
    for first in range(0, n, block):
        columns = first + tl.arange(0, block)
        inside = columns < n
        other = tl.load(scale_ptr + item * n + columns, mask=inside, other=1.0)
        value = tl.load(products + columns, mask=inside, other=-float("inf"))
        value = tl.minimum(value * own * other, same)
        if store:
            tl.store(products + columns, value, mask=inside)
        best = tl.maximum(best, tl.where(columns != start + row, value, -float("inf")))
    tl.store(nearest_ptr + item * tl.num_programs(0) + row, tl.max(best, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    similarity_ptr, first_ptr, picks_ptr, n, count, item_stride, row_stride, block: tl.constexpr
):
    item = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    nearest = tl.full([block], -float("inf"), tl.float32)
    pick = tl.load(first_ptr + item)
    for step in range(count):
        tl.store(picks_ptr + item * count + step, pick)
        row = similarity_ptr + item * item_stride + pick * row_stride
        # Columns that do not exist or were picked are at +inf: the minimum never falls on them.
        similarity = tl.load(row + columns, mask=columns < n, other=float("inf"))
        nearest = tl.maximum(nearest, similarity)
        nearest = tl.where(columns == pick, float("inf"), nearest)
        pick = tl.argmin(nearest, axis=0).to(tl.int64)  # the lowest index on ties


@triton.jit  # type: ignore[untyped-decorator]
def _pick_block(  # type: ignore[no-untyped-def]
    product_ptr,
    scale_ptr,
    bound_ptr,
    index_ptr,
    outside_ptr,
    picks_ptr,
    taken_ptr,
    new_ptr,
    n,
    count,
    size,
    same,
    block: tl.constexpr,
):
    slots = tl.arange(0, block)
    inside = slots < size
    index = tl.load(index_ptr + slots, mask=inside, other=0)
    bound = tl.load(bound_ptr + index, mask=inside, other=float("inf"))
    scale = tl.load(scale_ptr + index, mask=inside, other=0.0)
    other = tl.load(outside_ptr)  # the first row outside the block; n if there is none
    limit = tl.load(bound_ptr + other, mask=other < n, other=float("inf"))
    taken = tl.load(taken_ptr)
    new = tl.zeros([block], tl.int32)
    best = tl.min(bound, axis=0)
    at = tl.argmin(bound, axis=0)  # indices ascend: the lowest on ties
    pick = tl.load(index_ptr + at)
    while (taken < count) & ((best < limit) | ((best == limit) & (pick < other))):
        tl.store(picks_ptr + taken, pick)
        taken += 1
        product = tl.load(product_ptr + at.to(tl.int64) * n + index, mask=inside, other=0.0)
        similarity = tl.minimum(product * tl.load(scale_ptr + pick) * scale, same)
        bound = tl.where(slots == at, float("inf"), tl.maximum(bound, similarity))
        new = tl.where(slots == at, 1, new)
        best = tl.min(bound, axis=0)
        at = tl.argmin(bound, axis=0)
        pick = tl.load(index_ptr + at)
    tl.store(taken_ptr, taken)
    tl.store(new_ptr + slots, new, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _raise(  # type: ignore[no-untyped-def]
    product_ptr, scale_ptr, bound_ptr, index_ptr, new_ptr, n, size, same, block: tl.constexpr
):
    columns = tl.program_id(0) * block + tl.arange(0, block)
    inside = columns < n
    scale = tl.load(scale_ptr + columns, mask=inside, other=0.0)
    bound = tl.load(bound_ptr + columns, mask=inside, other=0.0)
    for slot in range(size):
        if tl.load(new_ptr + slot) != 0:
            row = product_ptr + tl.cast(slot, tl.int64) * n
            pick = tl.load(index_ptr + slot)
            product = tl.load(row + columns, mask=inside, other=0.0)
            similarity = tl.minimum(product * tl.load(scale_ptr + pick) * scale, same)
            bound = tl.where(columns == pick, float("inf"), tl.maximum(bound, similarity))
    tl.store(bound_ptr + columns, bound, mask=inside)


def nearest_other(gram: Tensor, scale: Tensor, start: int = 0, *, store: bool = True) -> Tensor:
    """Similarity of each row to the nearest other one, `[B, R]` float32; -inf where there is none.

    `gram` `[B, R, N or more]` float32, rows contiguous, has the products of rows `start` to `start
    + R` with all N rows, `scale` `[B, N]` one over the length of each row. `store` turns `gram`
    into similarities, at most `SAME`, in place.
    """
    items, rows, _ = gram.shape
    n = scale.shape[-1]
    nearest = torch.empty(items, rows, device=gram.device)
    strides = (gram.stride(0), gram.stride(1))
    block = min(_ROW_BLOCK, max(16, triton.next_power_of_2(n)))
    _similarity[(rows, items)](gram, scale, nearest, n, start, *strides, SAME, store, block=block)
    return nearest


def max_min_select(similarity: Tensor, first: Tensor, count: int) -> Tensor:
    """Pick the row least similar to all picks so far, `count` times, after the `first` `[B]` int64.

    `similarity` is `[B, N, N]` float32, rows contiguous, its diagonal not read. Returns `[B,
    count]` int64 in the order of picking; no row twice, ties to the lowest index. A ValueError says
    that a shape or dtype does not fit, or that there are more tokens than `MAX_TOKENS`.
    """
    items, n, columns = similarity.shape
    if n != columns or n > MAX_TOKENS or not 0 < count <= n:
        raise ValueError(
            f"max_min_select got {list(similarity.shape)} for {count} picks; "
            f"give [B, N, N] with count <= N <= {MAX_TOKENS}"
        )
    if similarity.dtype != torch.float32 or similarity.stride(-1) != 1:
        raise ValueError(f"max_min_select got {similarity.dtype}; give contiguous float32 rows")
    picks = torch.empty(items, count, dtype=torch.int64, device=similarity.device)
    strides = (similarity.stride(0), similarity.stride(1))
    block, first = triton.next_power_of_2(n), first.to(torch.int64).contiguous()
    _select[(items,)](
        similarity, first, picks, n, count, *strides, block=block, num_warps=warps(block)
    )
    return picks


def pick_block(
    product: Tensor,
    scale: Tensor,
    bound: Tensor,
    index: Tensor,
    outside: Tensor,
    picks: Tensor,
    taken: Tensor,
) -> Tensor:
    """Continue the picks inside a block of rows as long as no row outside can come first.

    `index` `[S]` int64 ascending has the rows of the block, those of lowest (bound, index), and
    `outside` `[1]` int64 the next one in that order, N if there is none. `product` `[S, N]`
    float32, contiguous, has their inner products with all rows, `scale` `[N]` one over the length
    of each row, `bound` `[N]` the similarity of each to the nearest pick, +inf for picks. New picks
    are written into `picks` `[count]` int64 from `taken` `[1]` int64 on, which is advanced. Returns
    `[S]` int32, 1 for the rows of the block that were picked.
    """
    size, n = product.shape
    new = torch.empty(size, dtype=torch.int32, device=product.device)
    block = max(16, triton.next_power_of_2(size))
    state = (scale, bound, index, outside, picks, taken, new)
    _pick_block[(1,)](product, *state, n, len(picks), size, SAME, block=block, num_warps=1)
    return new


def raise_bounds(product: Tensor, scale: Tensor, bound: Tensor, index: Tensor, new: Tensor) -> None:
    """Bring `bound` up to date with the picks that `new` marks; arguments as of `pick_block`."""
    size, n = product.shape
    grid = (triton.cdiv(n, _COLUMN_BLOCK),)
    _raise[grid](product, scale, bound, index, new, n, size, SAME, block=_COLUMN_BLOCK)


def warps(block: int) -> int:
    """Return warps for `block` running maxima, at most 16 a thread: no chip spills them."""
    return min(32, max(1, block // 256))
