"""Difference of every patch of a video from the same patch one frame earlier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.core.errors import MmfastError

Array = NDArray[np.floating[Any]]


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Dot products of rows `[..., D]`, float64; equal rows have equal ones, to the bit."""
    wide = torch.promote_types(a.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    if a.device.type != "cpu" or torch.compiler.is_compiling():
        product: Tensor = torch.linalg.vecdot(a, b)
        return product.double()
    # BLAS row by row reads both once; torch writes the products out before it adds them.
    return torch.from_numpy(np.asarray(np.vecdot(rows_of(a), rows_of(b)))).double()


def rows_of(x: Tensor) -> Array:
    """A host tensor as numpy array with contiguous rows: BLAS sums others in another order."""
    x = x.detach()
    whole = x.shape[-1] == 1 or x.stride(-1) == 1
    return (x if whole else x.contiguous()).numpy()


_CHUNK = 2_000_000  # numbers processed at once: they fit a processor's cache
_SPAN = 64  # most frames processed at once


class Difference(NamedTuple):
    """Changes since the frame before."""

    cosine: Tensor  # `[F, n]` float64; 1: equal rows, 0: a zero row, -inf: a clip's first frame
    l1: Tensor | None  # `[F, n]` mean absolute difference; 0 for equal rows, inf in a first frame
    norm: Tensor  # `[F, n]` Euclidean length of each row


def reference(x: Tensor, lengths: Sequence[int] | None = None, l1: bool = True) -> Difference:
    """Compute `temporal_difference` directly, with temporaries as large as the clip."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    before = wide.roll(1, 0)
    square = wide.square().sum(-1).double()
    scale = (square * square.roll(1, 0)).sqrt()
    cosine = (wide * before).sum(-1).double() / scale.masked_fill(scale == 0, torch.inf)
    opens = _opens(lengths or [len(x)], x.device)
    change = (wide - before).abs().mean(-1).masked_fill(opens, torch.inf) if l1 else None
    return Difference(cosine.masked_fill(opens, -torch.inf), change, square.sqrt().to(wide.dtype))


def temporal_difference(
    x: Tensor, lengths: Sequence[int] | None = None, l1: bool = True
) -> Difference:
    """Cosine, mean absolute difference and length of every patch over time, in one read.

    EVS (Bagrov et al., 2025) thresholds differences, HoliTom (Shao et al., NeurIPS 2025) cosines.
    `x` `[F, n, D]` holds all clips of `lengths` frames one after the other, by default one clip.
    """
    lengths = [len(x)] if lengths is None else list(lengths)
    if sum(lengths) != len(x) or min(lengths, default=0) < 0:
        raise MmfastError(f"clips of {lengths} frames in {len(x)} frames; lengths have to add up")
    if not x.numel():
        return reference(x, lengths, l1)
    if x.device.type == "cpu":
        return _on_host(x.detach(), lengths, l1)
    if x.is_cuda and x.dtype != torch.float64:
        from mmfast.kernels import temporal_difference as kernel

        if x.shape[-1] <= kernel.MAX_WIDTH:
            rows = x if x.stride(-1) == 1 else x.contiguous()
            return Difference(*kernel.temporal_difference(rows, lengths, l1))
    return _in_chunks(x, lengths, l1)


def static_runs(static: Tensor) -> Tensor:
    """Length of the run of `static` frames that ends at each patch, `[F, n]` int32; 0 outside."""
    if static.is_cuda:
        from mmfast.kernels import temporal_difference as kernel

        return kernel.static_runs(static)
    frame = torch.arange(1, len(static) + 1, dtype=torch.int32, device=static.device)[:, None]
    changed = torch.where(static, 0, frame)
    return frame - (changed.cummax(0).values if len(static) else changed)


def _on_host(x: Tensor, lengths: Sequence[int], l1: bool) -> Difference:
    """Process a few patches at a time, so that each is read from memory once."""
    frames, n, _ = x.shape
    dot, square = torch.zeros(2, frames, n, dtype=torch.float64)
    wide = torch.promote_types(x.dtype, torch.float32)
    change = torch.empty(frames, n, dtype=wide)
    for block, first, begin, spots in _blocks(x):
        end = first + len(block)
        square[begin:end, spots] = row_dots(block[begin - first :], block[begin - first :])
        dot[first + 1 : end, spots] = row_dots(block[1:], block[:-1])
        if l1:
            change[first + 1 : end, spots] = (block[1:] - block[:-1]).abs_().mean(-1)
    scale = torch.zeros_like(square)
    scale[1:] = (square[1:] * square[:-1]).sqrt_()
    cosine = dot.div_(scale.masked_fill_(scale == 0, torch.inf))
    opens = _opens(lengths, x.device)
    return Difference(
        cosine.masked_fill_(opens, -torch.inf),
        change.masked_fill_(opens, torch.inf) if l1 else None,
        square.sqrt_().to(wide),
    )


def _blocks(x: Tensor) -> Iterator[tuple[Tensor, int, int, slice]]:
    """Yield parts of `x` in float32 at least: `[first : first + F, spots]`, new from `begin` on."""
    frames, n, d = x.shape
    wide = torch.promote_types(x.dtype, torch.float32)
    span = min(frames, _SPAN)
    few = min(n, max(1, _CHUNK // (span * d)))
    buffer = None if x.dtype == wide else x.new_empty((span + 1) * few * d, dtype=wide)
    for spot in range(0, n, few):
        spots = slice(spot, min(spot + few, n))
        for begin in range(0, frames, span):
            first = max(begin - 1, 0)
            block = x[first : begin + span, spots]
            if buffer is not None:
                block = buffer[: block.numel()].view(block.shape).copy_(block)
            yield block, first, begin, spots


def _in_chunks(x: Tensor, lengths: Sequence[int], l1: bool) -> Difference:
    opens = _opens(lengths, x.device)
    wide = torch.promote_types(x.dtype, torch.float32)
    kinds = (torch.float64, wide, wide)
    cosine, change, norm = (x.new_empty(x.shape[:2], dtype=kind) for kind in kinds)
    for block, first, begin, spots in _blocks(x):
        part, new = reference(block, l1=l1), slice(begin - first, None)
        at = (slice(begin, first + len(block)), spots)
        cosine[at], norm[at] = part.cosine[new], part.norm[new]
        if part.l1 is not None:
            change[at] = part.l1[new]
    cosine.masked_fill_(opens, -torch.inf)
    return Difference(cosine, change.masked_fill_(opens, torch.inf) if l1 else None, norm)


def _opens(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Mark the first frame of each clip, `[F, 1]`."""
    opens = torch.zeros(sum(lengths), 1, dtype=torch.bool)
    firsts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    opens[[first for first, length in zip(firsts, lengths, strict=True) if length]] = True
    return opens.to(device)
