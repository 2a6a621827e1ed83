"""Rows of unit length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmfast.ops.ranking import ROUNDING, snap
from mmfast.ops.temporal_difference import row_dots, temporal_difference


def unit_rows(x: Tensor) -> Tensor:
    """Divide every row of `x` `[..., N, D]` by its length, in at least float32.

    A zero row stays zero: its cosine with anything is 0, never NaN.
    """
    rows = x.to(torch.promote_types(x.dtype, torch.float32))
    length: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)  # [..., N, 1]
    length = length.masked_fill(length == 0, torch.inf)
    own = rows is not x and not rows.requires_grad  # a copy may be overwritten
    unit: Tensor = rows.div_(length) if own else rows / length
    return unit


# Products of equal rows may differ in the last bits, by their place in the matrix.
_ROUNDING = 2.0**-22

# Products held at a time: 4 MB of float32 stay in a processor's cache, a GPU wants large ones.
_CHUNK, _CHUNK_CUDA = 1 << 20, 1 << 28


def nearest(cosine: Tensor) -> Tensor:
    """For each row of `cosine` `[..., A, B]` the first column that is largest up to rounding.

    Returns:
        `[..., A]` int64. Among equal tokens the lowest index wins on any device and shape.
    """
    best = cosine.amax(dim=-1, keepdim=True)
    return (cosine >= best - _ROUNDING).byte().argmax(dim=-1)


def nearest_rows(a: Tensor, b: Tensor, *, not_first: bool = False) -> Tensor:
    """The row of `b` with the largest product for each row of `a`, as `nearest` counts ties.

    The matrix of products is never there as a whole: rows of `a` are taken a chunk at a time.

    Args:
        a: `[..., A, D]` unit rows.
        b: `[..., B, D]` unit rows.
        not_first: The first row of `b` is no choice while there is another.

    Returns:
        `[..., A]` int64.
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


_PAIR_CHUNK = (
    1_000_000  # numbers compared at once on the host: the three products then share a cache
)


def paired_cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` with the row of `b` in its place, both `[..., D]`: float64 `[...]`.

    Equal rows give exactly 1: their dot product and their squared lengths come from the same
    summation, and the root of a square is exact in float64. A static video is then a set of true
    ties, not of rounding noise in either direction. A zero row has cosine 0 with anything.
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


def temporal_cosine(x: Tensor, frames: int) -> Tensor:
    """Cosine of every token with the token at the same place one frame later.

    Args:
        x: `[..., frames * n, D]`, frame after frame.
        frames: Number of frames T.

    Returns:
        `[..., T - 1, n]` float64.
    """
    video = x.unflatten(-2, (frames, -1))  # [..., T, n, D]
    lead, n = video.shape[:-3], video.shape[-2]
    flat = video.reshape(-1, n, x.shape[-1])
    cosine = temporal_difference(flat, [frames] * (len(flat) // frames), l1=False).cosine
    return cosine.reshape(*lead, frames, n)[..., 1:, :]


_TABLE_CHUNK = 1 << 19  # float64 numbers of a temporary, 4 MB: they stay in cache


def cosine_table(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each row of `a` `[..., A, D]` with each row of `b` `[..., B, D]`.

    Returns:
        `[..., A, B]` float64 in steps of 2^-30: equal rows have equal entries. A zero row has
        cosine 0 with anything, itself included.
    """
    parts = list(cosine_parts(a, b))
    return parts[0] if len(parts) == 1 else torch.cat(parts, -2)


def cosine_parts(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """`cosine_table` some rows of `a` at a time, for what needs each row of the table once.

    Yields:
        `[..., rows, B]`; nothing in float64 is as large as `a` or the table.
    """
    columns = unit_rows(b.double()).transpose(-1, -2)
    items, widest = a.shape[:-2].numel(), max(1, a.shape[-1], b.shape[-2])
    for rows in a.split(max(64, _TABLE_CHUNK // max(1, items * widest)), -2):
        yield snap(unit_rows(rows.double()) @ columns)


def first_of_equal(rows: Tensor) -> Tensor:
    """For every row of `rows` `[N, D]`, float32 or float64, the first row equal to it: `[N]`.

    Rows that differ in a few spread columns cannot be equal, so only the others are compared in
    full: video that really stands still costs one pass, anything else next to nothing.
    """
    n, width = rows.shape
    first = torch.arange(n, device=rows.device)
    probe = rows[:, :: max(1, width // 8)]
    suspects = first
    for columns in (probe, rows):
        _, group, sizes = torch.unique(
            _hash(columns[suspects] if len(suspects) < n else columns),
            return_inverse=True,
            return_counts=True,
        )
        repeated = sizes[group] > 1
        suspects, group = suspects[repeated], group[repeated]
        if not len(suspects):
            return first
    lowest = torch.full((len(sizes),), n, device=rows.device)
    lowest = lowest.scatter_reduce(0, group, suspects, "amin")[group]
    equal = (rows[suspects] == rows[lowest]).all(-1)  # a collision of hashes is no equality
    first[suspects[equal]] = lowest[equal]
    return first


def _hash(rows: Tensor) -> Tensor:
    """One int64 per row `[N, D]`: sums of bits times odd numbers, wrapping, in any order."""
    bits = (rows + 0.0).view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
    generator = torch.Generator().manual_seed(0)
    odd = 2 * torch.randint(2**61, (bits.shape[-1],), generator=generator) + 1
    return (bits * odd.to(rows.device)).sum(-1)


_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)


def closeness(x: Tensor, centre: Tensor) -> Tensor:
    """Sum of `exp(-|x - centre|^2 / (2 a))` over five widths a from 1/8 to 2: 5 at the centre.

    Args:
        x: Rows `[..., n, C]`, of unit length in the methods that use it.
        centre: Broadcasts to them, `[..., 1, C]`.

    Returns:
        `[..., n]`.
    """
    square = (x - centre).square().sum(-1)
    total = (-square / (2 * _WIDTHS[0])).exp()
    for width in _WIDTHS[1:]:
        total = total + (-square / (2 * width)).exp()
    return total


def relevance(x: Tensor, query: Tensor) -> Tensor:
    """Relevance of each token to the words of the question, `[..., N]` float64.

    The cosine with a word counts as far as it exceeds that word's mean over all tokens, so that a
    word near everything says nothing; a token has the relevance of its best word.

    Args:
        x: `[..., N, D]`.
        query: `[..., T, D]`, in the space of `x`.
    """
    table = cosine_table(x, query)
    return snap((table - table.mean(dim=-2, keepdim=True)).amax(dim=-1))


def spatial_novelty(frame: Tensor, rows: int, columns: int) -> Tensor:
    """One minus the larger cosine with the token on the left and the one above.

    Args:
        frame: `[..., rows * columns, D]`.
        rows: Rows of the raster.
        columns: Tokens in a row.

    Returns:
        `[..., rows * columns]` float64; infinite for the first token, which has no such neighbour.
    """
    image = frame.unflatten(-2, (rows, columns))
    alike = torch.full(image.shape[:-1], -torch.inf, dtype=torch.float64, device=image.device)
    alike[..., 1:] = paired_cosine(image[..., 1:, :], image[..., :-1, :])
    above = paired_cosine(image[..., 1:, :, :], image[..., :-1, :, :])
    alike[..., 1:, :] = torch.maximum(alike[..., 1:, :], above)
    return 1.0 - alike.flatten(-2)


_KEPT_CHUNK = 1 << 19  # float64 numbers of a temporary on the host, 4 MB
Floats = NDArray[np.floating[Any]]


class SinceKept:
    """A video whose tokens are kept where they differ from the last one kept at their place.

    The first frame is kept. All pairs of frames are compared beforehand, `T * N` numbers, so that
    many thresholds can be tried.
    """

    def __init__(self, x: Tensor, frames: int) -> None:
        """`x` is `[N, D]`, frame after frame."""
        places = x.detach().unflatten(0, (frames, -1)).transpose(0, 1)  # [n, T, D]
        self._change: Floats = _changes(places).cpu().numpy()  # [n, T, T]

    def changes(self, threshold: float) -> Floats:
        """Change of every later token since the last one kept, `[T - 1, n]` float64.

        Args:
            threshold: A token whose change is above it is kept, and the next is compared with it.
        """
        n, frames, _ = self._change.shape
        place, last = np.arange(n), np.zeros(n, dtype=np.int64)
        seen = np.empty((frames - 1, n))
        for t in range(1, frames):
            seen[t - 1] = self._change[place, last, t]
            last[seen[t - 1] > threshold] = t
        return seen

    def tuned(self, count: int) -> float:
        """The threshold, by bisection, at which just `count` later tokens are kept.

        It keeps at least `count`, and the next higher multiple of 2^-30 fewer; with a threshold of
        -1 or less everything is kept.
        """
        low, high = -round(1 / ROUNDING), round(2 / ROUNDING)  # nothing is above 2
        while high - low > 1:
            middle = (low + high) // 2
            if int((self.changes(middle * ROUNDING) > middle * ROUNDING).sum()) >= count:
                low = middle
            else:
                high = middle
        return low * ROUNDING


def _changes(places: Tensor) -> Tensor:
    """One minus the cosine of every two frames, of each place of `[n, T, D]`: `[n, T, T]`."""
    n, frames, width = places.shape
    few = n if places.is_cuda else max(1, _KEPT_CHUNK // max(1, frames * width))
    change = places.new_empty(n, frames, frames, dtype=torch.float64)
    for spot in range(0, n, max(1, few)):
        rows = unit_rows(places[spot : spot + few].double())
        change[spot : spot + few] = 1.0 - snap(rows @ rows.transpose(-1, -2))
    return change


_CHANNEL_CHUNK = 1 << 18  # float64 numbers of a temporary on the host, 2 MB: they stay in cache


def steady_channels(x: Tensor, count: int) -> Tensor:
    """The `count` channels of smallest population variance over the tokens, smallest first.

    Args:
        x: `[..., N, D]`; sums are float64.
        count: 1 to D.

    Returns:
        `[..., count]` int64; ties go to the lowest channel.
    """
    n = x.shape[-2]
    # From the first token on: a channel that never changes then has a variance of exactly 0.
    first = x[..., :1, :].double()
    mean = sum_of((part.double() - first).sum(-2, keepdim=True) for part in parts(x)) / n
    start = first + mean
    square = sum_of((part.double() - start).square_().sum(-2) for part in parts(x))
    return (square / n).sort(dim=-1, stable=True).indices[..., :count]


def parts(x: Tensor, least: int = 1) -> tuple[Tensor, ...]:
    """`x` `[..., N, D]` some tokens at a time, `least` or a multiple; all at once on a device."""
    if x.device.type != "cpu" or not x.numel():
        return (x,)
    rows = max(1, _CHANNEL_CHUNK * x.shape[-2] // (x.numel() * least)) * least
    some: tuple[Tensor, ...] = x.split(rows, -2)
    return some


def sum_of(terms: Iterable[Tensor]) -> Tensor:
    """Sum of at least one tensor."""
    return reduce(Tensor.add, terms)


def take_channels(x: Tensor, channels: Tensor) -> Tensor:
    """Channels `[..., C]` of `x` `[..., N, D]`: `[..., N, C]`."""
    if channels.shape[:-1].numel() == 1:  # an index per number is slow to read
        return x.index_select(-1, channels.flatten())
    index = channels[..., None, :].expand(*x.shape[:-1], channels.shape[-1])
    return x.gather(-1, index)


_FEW, _WIDTH, _GROUP = 12, 64, 64
_SMALL = 256  # rows up to which the whole product costs less than the search


def most_isolated(rows: Tensor, twins: Tensor) -> int:
    """The unit row `[U, D]` with the smallest cosine to its nearest other row.

    Exact without the whole U x U product: a row is out as soon as it has met one other row that
    is nearer than the nearest of the best row so far. Rows first meet those that share their
    nearest landmark, so most are out early.

    Args:
        rows: Distinct unit rows.
        twins: `[U]` bool, rows that stand for several equal ones: their nearest is at cosine 1.

    Returns:
        Its index, the lowest one on ties; 0 if all rows have twins.
    """
    alive = (~twins).nonzero()[:, 0]
    if not len(alive) or len(rows) < 2:
        return 0
    nearest = torch.full_like(rows[:, 0], -torch.inf)
    order = _spread(len(rows)).to(rows.device)
    done, width = 0, _WIDTH
    while len(rows) > _SMALL and len(alive) > 2 * _FEW and done < len(order):
        columns = order[done : done + width]
        cosine = _product(rows, alive, columns)
        nearest[alive] = torch.maximum(nearest[alive], cosine.amax(-1))
        if not done:
            _meet_group(rows, alive[cosine.argmax(-1).argsort()], nearest)
        alive = _hopeful(rows, alive, nearest)
        done, width = done + width, width * 2
    return int(alive[_product(rows, alive, None).amax(-1).argmin()])


def _hopeful(rows: Tensor, alive: Tensor, nearest: Tensor) -> Tensor:
    """Those of `alive` that may still win, after the most promising few have met every row."""
    few = alive[nearest[alive].topk(min(_FEW, len(alive)), largest=False).indices]
    best = _product(rows, few, None).amax(-1).min()
    # The margin keeps rows that another product would round to the other side.
    return alive[nearest[alive] <= best + 1e-6]


def _meet_group(rows: Tensor, sorted_rows: Tensor, nearest: Tensor) -> None:
    """Let rows that are sorted by landmark meet in groups, and raise `nearest` in place."""
    whole = len(sorted_rows) // _GROUP * _GROUP
    groups = sorted_rows[:whole].reshape(-1, _GROUP)
    members = rows[groups]  # [groups, _GROUP, D]
    cosine = members @ members.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    nearest[groups] = torch.maximum(nearest[groups], cosine.amax(-1))


def _product(rows: Tensor, left: Tensor, columns: Tensor | None) -> Tensor:
    """Cosines of rows `left` with rows `columns` (None: all), -inf of a row with itself."""
    ours = rows if len(left) == len(rows) else rows[left]
    if columns is None:
        cosine = ours @ rows.T
        cosine[torch.arange(len(left), device=left.device), left] = -torch.inf
        return cosine
    return (ours @ rows[columns].T).masked_fill_(left[:, None] == columns, -torch.inf)


def _spread(n: int) -> Tensor:
    """All indices below `n` in an order whose every prefix covers the whole sequence."""
    return (torch.arange(n, dtype=torch.float64) * 0.6180339887498949 % 1.0).argsort(stable=True)
