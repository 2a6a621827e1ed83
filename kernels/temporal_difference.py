"""Triton kernel of the difference of every patch from the same patch one frame earlier.

Eager code reads the clip several times: for the products, for both lengths, for the differences.
Here a program takes a few patches and walks along time: each row is loaded once and compared with
the row before, which is still in registers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WIDTH = 8192  # a row has to fit the registers of one program
_ELEMENTS = 4096  # of a tile, 32 a thread
_PROGRAMS = 1024  # as many as fill a large chip: 8 on each of 132 multiprocessors
_SHORTEST, _LONGEST = 8, 64  # frames of a chunk; each reads one frame more than that
_RUNS = (64, 32)  # frames and patches of a tile of runs


class TileShape(NamedTuple):
    """Tile of one program."""

    rows: int  # patches of a tile
    block: int  # columns of a tile
    warps: int
    stages: int  # tiles loaded from memory while one is processed


@triton.jit  # type: ignore[untyped-decorator]
def _difference(  # type: ignore[no-untyped-def]
    x_ptr, opens_ptr, cosine_ptr, l1_ptr, norm_ptr,
    frames, n, d, frame_stride, row_stride, period, chunk,
    ragged: tl.constexpr, with_l1: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, stages: tl.constexpr,
):  # fmt: skip
    spots = tl.program_id(0) * rows + tl.arange(0, rows)
    columns = tl.arange(0, block)
    exists = spots < n
    inside = exists[:, None] & (columns < d)[None, :]
    tile = x_ptr + spots.to(tl.int64)[:, None] * row_stride + columns[None, :]
    begin = tl.program_id(1) * chunk
    end = tl.minimum(begin + chunk, frames)
    earlier = tl.maximum(begin - 1, 0).to(tl.int64)
    last = tl.load(tile + earlier * frame_stride, mask=inside, other=0.0).to(tl.float32)
    last_square = tl.sum(last * last, axis=1)
    for frame in tl.range(begin, end, num_stages=stages):
        place = tl.cast(frame, tl.int64)
        now = tl.load(tile + place * frame_stride, mask=inside, other=0.0).to(tl.float32)
        square = tl.sum(now * now, axis=1)
        dot = tl.sum(now * last, axis=1)
        # The root of a square is exact in float64: equal rows have cosine 1 and nothing else.
        scale = tl.sqrt(square.to(tl.float64) * last_square.to(tl.float64))
        cosine = tl.where(scale > 0, dot.to(tl.float64) / tl.where(scale > 0, scale, 1.0), 0.0)
        opens = tl.load(opens_ptr + frame) != 0 if ragged else frame % period == 0
        out = place * n + spots
        tl.store(cosine_ptr + out, tl.where(opens, -float("inf"), cosine), mask=exists)
        tl.store(norm_ptr + out, tl.sqrt(square), mask=exists)
        if with_l1:
            l1 = tl.sum(tl.abs(now - last), axis=1) / d
            tl.store(l1_ptr + out, tl.where(opens, float("inf"), l1), mask=exists)
        last = now
        last_square = square


@triton.jit
def _later(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b)


@triton.jit  # type: ignore[untyped-decorator]
def _runs(  # type: ignore[no-untyped-def]
    static_ptr, runs_ptr, frames, n, block: tl.constexpr, rows: tl.constexpr
):
    spots = tl.program_id(0) * rows + tl.arange(0, rows)
    changed = tl.full((rows,), -1, tl.int32)  # the last frame in which a patch was not static
    for begin in tl.range(0, frames, block):
        frame = begin + tl.arange(0, block)
        place = tl.cast(frame, tl.int64)[:, None] * n + spots[None, :]
        inside = (frame < frames)[:, None] & (spots < n)[None, :]
        static = tl.load(static_ptr + place, mask=inside, other=1) != 0
        moved = tl.where(static, -1, frame[:, None])
        latest = tl.maximum(tl.associative_scan(moved, 0, _later), changed[None, :])
        tl.store(runs_ptr + place, frame[:, None] - latest, mask=inside)
        changed = tl.max(latest, axis=0)


def temporal_difference(
    x: Tensor, lengths: Sequence[int], l1: bool = True
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compare every patch with the same patch one frame earlier.

    `x` is `[F, n, D]` float32, float16 or bfloat16, the frames of all clips one after the other
    (`lengths` frames each), D at most `MAX_WIDTH` and contiguous. Returns cosines `[F, n]` float64
    (0 with a zero row, -inf in the first frame of a clip), with `l1` mean absolute differences `[F,
    n]` float32 (inf there), else None, and lengths `[F, n]` float32. A ValueError says that a shape
    or dtype does not fit.
    """
    frames, n, d = x.shape
    if d > MAX_WIDTH or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"temporal_difference got {x.dtype} of width {d}; give {MAX_WIDTH} at most"
        )
    if sum(lengths) != frames or (d > 1 and x.stride(-1) != 1):
        raise ValueError(
            f"temporal_difference got {frames} frames, strides {x.stride()}, for clips of "
            f"{list(lengths)}; give contiguous rows and lengths that add up"
        )
    cosine = torch.empty(frames, n, dtype=torch.float64, device=x.device)
    norm = torch.empty(frames, n, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(norm) if l1 else None
    if not x.numel():
        raise ValueError(f"temporal_difference got {list(x.shape)}; give one token at least")
    ragged = len(set(lengths)) > 1
    cut = shape(d)
    tiles = triton.cdiv(n, cut.rows)
    chunk = chunk_frames(frames, tiles)
    with torch.cuda.device_of(x):
        _difference[(tiles, triton.cdiv(frames, chunk))](
            x, _opens(lengths, x.device) if ragged else None, cosine, mean, norm,
            frames, n, d, x.stride(0), x.stride(1), lengths[0], chunk,
            ragged=ragged, with_l1=l1, rows=cut.rows, block=cut.block, stages=cut.stages,
            num_warps=cut.warps,
        )  # fmt: skip
    return cosine, mean, norm


def static_runs(static: Tensor) -> Tensor:
    """Steps for which a patch has not changed, 0 if it did: `[F, n]` bool to `[F, n]` int32."""
    frames, n = static.shape
    runs = torch.empty(frames, n, dtype=torch.int32, device=static.device)
    if runs.numel():
        block, rows = _RUNS
        with torch.cuda.device_of(static):
            _runs[(triton.cdiv(n, rows),)](
                static.contiguous().view(torch.uint8), runs, frames, n, block=block, rows=rows
            )
    return runs


def shape(d: int) -> TileShape:
    """Return the tile for rows of width `d`: about 4,096 elements, 32 a thread."""
    block = max(16, triton.next_power_of_2(d))
    return TileShape(max(1, _ELEMENTS // block), block, max(4, block // 1024), 3)


def chunk_frames(frames: int, tiles: int) -> int:
    """Return the frames of one program: enough programs for a chip, few frames read twice."""
    longest: int = triton.cdiv(frames, triton.cdiv(_PROGRAMS, tiles))
    return min(max(longest, _SHORTEST), _LONGEST)


def _opens(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Mark the first frame of each clip, `[F]` uint8."""
    opens = torch.zeros(sum(lengths), dtype=torch.uint8)
    first = 0
    for length in lengths:
        if length:
            opens[first] = 1
        first += length
    return opens.to(device, non_blocking=True)
