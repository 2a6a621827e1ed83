"""Cosines of rows: pairs, tables and nearest rows, with equal rows as exact ties; leverage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce

import torch
from torch import Tensor

from mmfast.ops.ranking import snap
from mmfast.ops.temporal_difference import row_dots

_RIDGE = 1e-3  # of the mean variance: fewer tokens than channels would otherwise all be alike
_FLOOR = 2.0**-40  # equal keys differ from their mean by rounding alone


def unit_rows(x: Tensor) -> Tensor:
    """Divide every row of `x` `[..., N, D]` by its length, in at least float32; zero rows stay."""
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)  # [..., N, 1]
    length = length.masked_fill(length == 0, torch.inf)
    own = rows is not x and not rows.requires_grad  # a copy may be overwritten
    return rows.div_(length) if own else rows / length


# Products of equal rows may differ in the last bits, by their place in the matrix.
_ROUNDING = 2.0**-22

# Products held at a time: 4 MB of float32 stay in a processor's cache, a GPU wants large ones.
_CHUNK, _CHUNK_CUDA = 1 << 20, 1 << 28


def nearest(cosine: Tensor) -> Tensor:
    """First column of `cosine` `[..., A, B]` that is largest up to rounding: `[..., A]`."""
    best = cosine.amax(dim=-1, keepdim=True)
    return (cosine >= best - _ROUNDING).byte().argmax(dim=-1)


def nearest_rows(a: Tensor, b: Tensor, *, not_first: bool = False) -> Tensor:
    """Row of `b` with the largest product for each row of `a`, ties as in `nearest`.

    The matrix of products is never held as a whole; `not_first` leaves out `b[0]`, unless alone.
    """
    columns = b.transpose(-1, -2)
    one_row = max(1, a.shape[:-2].numel() * b.shape[-2])
    step = max(64, (_CHUNK_CUDA if a.is_cuda else _CHUNK) // one_row)
    found = []
    for rows in a.split(step, -2):
        cosine = rows @ columns
        if not_first:
            cosine[..., 0] = -torch.inf
        found.append(nearest(cosine))
    return found[0] if len(found) == 1 else torch.cat(found, -1)


_PAIR_CHUNK = 1_000_000  # numbers compared at once on the host: their three products fit a cache


def paired_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` with the row of `b` in its place, both `[..., D]`: float64 `[...]`.

    Equal rows give exactly 1: their dot product and their squared lengths come from the same
    summation, and the root of a square is exact in float64. The tokens of a static video are then
    true ties, without rounding noise. A zero row has cosine 0 with anything.
    """
    small = a.device.type != "cpu" or a.numel() <= _PAIR_CHUNK or torch.compiler.is_compiling()
    if not small and a.ndim > 1 and a.shape == b.shape:
        if len(a) == 1:
            return paired_cosine(a[0], b[0])[None]
        some = max(1, len(a) * _PAIR_CHUNK // a.numel())
        pairs = zip(a.split(some), b.split(some), strict=True)
        return torch.cat([paired_cosine(*pair) for pair in pairs])
    scale = (row_dots(a, a) * row_dots(b, b)).sqrt()
    return row_dots(a, b) / scale.masked_fill(scale == 0, torch.inf)


TABLE_CHUNK = 1 << 19  # float64 numbers of a temporary, 4 MB: they stay in cache


def cosine_table(a: Tensor, b: Tensor) -> Tensor:
    """Cosines `[..., A, B]` of rows `[..., A, D]` and `[..., B, D]`, float64 in steps of 2^-30."""
    parts = list(cosine_parts(a, b))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def cosine_parts(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """Yield `cosine_table` some rows of `a` at a time, for callers that need each row once."""
    columns = unit_rows(b.double()).transpose(-1, -2)
    items, widest = a.shape[:-2].numel(), max(1, a.shape[-1], b.shape[-2])
    for rows in a.split(max(64, TABLE_CHUNK // max(1, items * widest)), -2):
        yield snap(unit_rows(rows.double()) @ columns)


def relevance(x: Tensor, query: Tensor) -> Tensor:
    """Relevance of each token `[..., N, D]` to the words `[..., T, D]` of the question, `[..., N]`.

    The cosine with a word counts as far as it exceeds that word's mean over all tokens, so that a
    word near everything does not count; a token has the relevance of its best word.
    """
    table = cosine_table(x, query)
    return snap((table - table.mean(dim=-2, keepdim=True)).amax(dim=-1))


def rough_lengths(rows: Tensor) -> tuple[Tensor, float] | None:
    """Lengths `[..., N]` of rows `[..., N, d]` float32, and the share by which they may be off.

    None where a length is not finite, or leaves the range in which squares keep their precision.
    """
    lengths = torch.linalg.vector_norm(rows, dim=-1).contiguous()
    told = lengths.numpy()
    if not (told.min() > 1e-12 and told.max() < 1e18):  # NaN is neither
        return None
    return lengths, (rows.shape[-1] + 16) * 2.0**-24  # twice the bound for a sum in any order


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    """Sum of at least one tensor."""
    return reduce(Tensor.add, terms)


def leverage_scores(keys: Tensor, rank: int, seed: int) -> Tensor:
    """Ridge leverage `[..., N]` in [0, 1) of keys `[..., N, d]` about their mean, in float64."""
    rows = keys.double()
    rows = rows - rows.mean(-2, keepdim=True)
    width = rows.shape[-1]
    if 0 < rank < width:
        generator = torch.Generator().manual_seed(seed)
        plane = torch.randn(width, rank, dtype=torch.float64, generator=generator)
        rows = rows @ (plane / rank**0.5).to(rows.device)
    gram = rows.transpose(-1, -2) @ rows
    ridge = _RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1) + _FLOOR
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(gram + ridge[..., None, None] * eye)
    solved = torch.linalg.solve_triangular(factor, rows.transpose(-1, -2), upper=False)
    scores: Tensor = solved.square().sum(-2)
    return scores
