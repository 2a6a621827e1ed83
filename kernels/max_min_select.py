"""Greedy max-min selection on a matrix of similarities, all steps in one launch.

A loop in Python costs four launches a pick, about 30 ms for 1,568 picks of 6,272 tokens. Here one
program per item keeps the running maximum in registers and reads one row of the matrix a pick.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The running maximum of one item has to fit the registers of one program.
MAX_TOKENS = 16_384


@triton.jit  # type: ignore[untyped-decorator]
def _select(  # type: ignore[no-untyped-def]
    similarity_ptr, first_ptr, picks_ptr, n, count, item_stride, row_stride, block: tl.constexpr
):
    item = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < n
    # Columns that were picked or do not exist are at +inf: the minimum never falls on them.
    nearest = tl.where(inside, -float("inf"), float("inf"))
    pick = tl.load(first_ptr + item)
    for step in range(count):
        tl.store(picks_ptr + item * count + step, pick)
        row = similarity_ptr + item * item_stride + pick * row_stride
        similarity = tl.load(row + columns, mask=inside, other=float("inf"))
        nearest = tl.maximum(nearest, similarity)
        nearest = tl.where(columns == pick, float("inf"), nearest)
        pick = tl.argmin(nearest, axis=0).to(tl.int64)  # the lowest index on ties


def max_min_select(similarity: Tensor, first: Tensor, count: int) -> Tensor:
    """Pick the row least similar to all picks so far, `count` times.

    Args:
        similarity: `[B, N, N]` float32, rows contiguous, N at most `MAX_TOKENS`; the diagonal is
            not looked at.
        first: `[B]` int64, the first pick of each item.
        count: Picks per item, at most N.

    Returns:
        `[B, count]` int64 in the order of picking; no row twice, ties to the lowest index.

    Raises:
        ValueError: More tokens than fit one program, or a shape or dtype does not fit.
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
    block = triton.next_power_of_2(n)
    _select[(items,)](
        similarity,
        first.to(torch.int64),
        picks,
        n,
        count,
        similarity.stride(0),
        similarity.stride(1),
        block=block,
        num_warps=warps(block),
    )
    return picks


def warps(block: int) -> int:
    """Warps for `block` running maxima: 16 a thread at most, which no chip has to spill."""
    return min(32, max(1, block // 256))
