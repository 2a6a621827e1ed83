"""Greedy max-min selection: every pick is the row farthest from all picks before it.

On the host, equal rows are joined first and `LazyGreedy` searches; on a GPU, a kernel searches the
matrix of similarities, or blocks of rows where the matrix would be too large.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmfast.ops.dpp import LazyGreedy
from mmfast.ops.ranking import ROUNDING
from mmfast.ops.similarity import cosine_table, unit_rows

# Cosines this close to 1 differ by rounding only: such rows count as equal.
_SAME = 1.0 - 2.0**-20


def max_min(x: Tensor, count: int) -> Tensor:
    """Pick `count` rows of `[..., N, D]` by greatest cosine distance to the rows already picked.

    The first pick is the row whose nearest other row is farthest away. Ties go to the lowest index;
    a row is picked once, and rows equal to a pick come last, lowest index first. A zero row is at
    distance 1 from all but other zero rows, which equal it. Returns `[..., count]` int64 in order.
    """
    items = x.reshape(-1, *x.shape[-2:])
    if x.is_cuda:
        picks = max_min_device(items, count)
    else:
        picks = torch.stack([_on_host(item, count) for item in items])
    return picks.reshape(*x.shape[:-2], count)


def _on_host(x: Tensor, count: int) -> Tensor:
    """Pick `[count]` rows of one item `[N, D]`."""
    n = x.shape[0]
    rows = unit_rows(x)
    first = first_of_equal(rows)
    distinct = (first == torch.arange(n, device=x.device)).nonzero()[:, 0]
    twins = torch.bincount(first, minlength=n)[distinct] > 1
    if len(distinct) < n:
        rows = rows[distinct]
    start = most_isolated(rows, twins)
    search = LazyGreedy(rows.cpu(), min(count, len(rows)), stop=_SAME)
    picks = distinct[search.run([start]).to(x.device)]
    if len(picks) < count:
        free = torch.ones(n, dtype=torch.bool, device=x.device)
        free[picks] = False
        picks = torch.cat([picks, free.nonzero()[: count - len(picks), 0]])
    return picks


def first_of_equal(rows: Tensor) -> Tensor:
    """Return for every row of `rows` `[N, D]` the first equal row, `[N]`."""
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
    """Hash rows `[N, D]` to int64: wrapping sums of bits times odd numbers, in any order."""
    bits = (rows + 0.0).view(torch.int32 if rows.dtype == torch.float32 else torch.int64)
    generator = torch.Generator().manual_seed(0)
    odd = 2 * torch.randint(2**61, (bits.shape[-1],), generator=generator) + 1
    return (bits * odd.to(rows.device)).sum(-1)


_FEW, _WIDTH, _GROUP = 12, 64, 64
_ALL_AT_ONCE = 256  # rows up to which the whole product costs less than the search


def most_isolated(rows: Tensor, twins: Tensor) -> int:
    """Find the unit row of `[U, D]` with the smallest cosine to its nearest other row.

    A row is excluded as soon as another one is nearer to it than the nearest of the best so far;
    those that share a nearest landmark are compared first. Rows are distinct; `twins` stand for
    several equal ones, at cosine 1. The lowest index wins ties; 0 if all have twins.
    """
    alive = (~twins).nonzero()[:, 0]
    if not len(alive) or len(rows) < 2:
        return 0
    nearest = torch.full_like(rows[:, 0], -torch.inf)
    order = _spread(len(rows)).to(rows.device)
    done, width = 0, _WIDTH
    while len(rows) > _ALL_AT_ONCE and len(alive) > 2 * _FEW and done < len(order):
        columns = order[done : done + width]
        cosine = _cosines(rows, alive, columns)
        nearest[alive] = torch.maximum(nearest[alive], cosine.amax(-1))
        if not done:
            _meet_group(rows, alive[cosine.argmax(-1).argsort()], nearest)
        alive = _hopeful(rows, alive, nearest)
        done, width = done + width, width * 2
    return int(alive[_cosines(rows, alive, None).amax(-1).argmin()])


def _hopeful(rows: Tensor, alive: Tensor, nearest: Tensor) -> Tensor:
    """Return those of `alive` that may still be best, given the exact value of a few of them."""
    few = alive[nearest[alive].topk(min(_FEW, len(alive)), largest=False).indices]
    best = _cosines(rows, few, None).amax(-1).min()
    # The margin keeps rows that another product would round to the other side.
    return alive[nearest[alive] <= best + 1e-6]


def _meet_group(rows: Tensor, sorted_rows: Tensor, nearest: Tensor) -> None:
    """Compare rows sorted by landmark within groups, and raise `nearest` in place."""
    whole = len(sorted_rows) // _GROUP * _GROUP
    groups = sorted_rows[:whole].reshape(-1, _GROUP)
    members = rows[groups]  # [groups, _GROUP, D]
    cosine = members @ members.transpose(-1, -2)
    cosine.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)
    nearest[groups] = torch.maximum(nearest[groups], cosine.amax(-1))


def _cosines(rows: Tensor, left: Tensor, columns: Tensor | None) -> Tensor:
    """Cosines of rows `left` with rows `columns` (None: all), -inf of a row with itself."""
    ours = rows if len(left) == len(rows) else rows[left]
    if columns is None:
        cosine = ours @ rows.T
        cosine[torch.arange(len(left), device=left.device), left] = -torch.inf
        return cosine
    return (ours @ rows[columns].T).masked_fill_(left[:, None] == columns, -torch.inf)


def _spread(n: int) -> Tensor:
    """Order the indices below `n` so that every prefix covers the whole sequence evenly."""
    return (torch.arange(n, dtype=torch.float64) * 0.6180339887498949 % 1.0).argsort(stable=True)


LARGEST = 16_384  # tokens whose similarities, 1 GB, are computed at once
_BLOCK = 128  # rows picked among themselves
_PASSES = 8  # blocks between two checks of the number of picks
_CHUNK = 1 << 26  # products held at a time while looking for the first pick, 256 MB


def max_min_device(x: Tensor, count: int, *, largest: int = LARGEST, block: int = _BLOCK) -> Tensor:
    """Picks `[B, count]` of `x` `[B, N, D]`, as `max_min` describes them.

    Half precision is multiplied as it is, which loses nothing in float32. Above `largest` tokens
    the matrix of similarities is never held, and `block` rows are picked among themselves.
    """
    rows, scale = _prepared(x)
    n = x.shape[1]
    if n > largest:
        return torch.stack([_blocks(*item, count, block) for item in zip(rows, scale, strict=True)])
    at_once = max(1, largest**2 // n**2)
    parts = zip(rows.split(at_once), scale.split(at_once), strict=True)
    return torch.cat([_whole(*part, count) for part in parts])


def _prepared(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows padded to `[B, N', D']`, with a one in rows of zeros, and cosine factors `[B, N]`."""
    x, n, width = x.detach(), *x.shape[1:]
    half = x.dtype in (torch.float16, torch.bfloat16)
    zero = (x == 0).all(-1)
    if half:
        length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32)
        scale = 1 / length.masked_fill(zero, 1.0)
    else:
        x, scale = unit_rows(x).float(), torch.ones(x.shape[:2], device=x.device)
    # Multiples of 16 all around: matrix units and loads of 16 bytes want it.
    rows = F.pad(x, (0, 16 - width % 16, 0, -n % 16))
    rows[:, :n, width] = zero.to(rows.dtype)
    return rows, scale


def _product(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.T` in float32, `[..., A, B]`."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float().mT
    multiply = torch.mm if a.ndim == 2 else torch.bmm
    return multiply(a, b.mT, out_dtype=torch.float32)


def _whole(rows: Tensor, scale: Tensor, count: int) -> Tensor:
    """Pick `[B, count]` from the matrix of all similarities, without a synchronisation."""
    from mmfast.kernels.max_min_select import max_min_select, nearest_other

    n = scale.shape[1]
    similarity = _product(rows, rows)[:, :n, :n]
    first = nearest_other(similarity, scale).argmin(-1)
    return max_min_select(similarity, first, count)


def _blocks(rows: Tensor, scale: Tensor, count: int, size: int) -> Tensor:
    """Pick `[count]` of one item, block by block, each brought up to date by one product.

    Similarity to the nearest pick only grows, so the rows of a block can be picked among themselves
    until one outside, whose bound is known, would come first.
    """
    from mmfast.kernels.max_min_select import pick_block, raise_bounds

    n = len(scale)
    picks = torch.empty(count, dtype=torch.int64, device=rows.device)
    picks[:1] = first = _first(rows, scale)
    taken = torch.ones(1, dtype=torch.int64, device=rows.device)
    bound = torch.full((n,), -torch.inf, device=rows.device)
    new = torch.ones(1, dtype=torch.int32, device=rows.device)
    raise_bounds(_one(rows, first, n), scale, bound, first, new)
    while int(taken) < count:
        for _ in range(_PASSES):
            index, outside = _next(bound, size)
            product = _one(rows, index, n)
            new = pick_block(product, scale, bound, index, outside, picks, taken)
            raise_bounds(product, scale, bound, index, new)
    return picks


def _one(rows: Tensor, index: Tensor, n: int) -> Tensor:
    return _product(rows.index_select(0, index), rows[:n])


def _next(bound: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the `size` rows of lowest (bound, index), by index, and the one after them."""
    n = len(bound)
    bits = bound.view(torch.int32).long()
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # the order of numbers
    place = torch.arange(n, device=bound.device)
    key = bits * 2**32 + place  # no two are equal, so any order of ties will do
    lowest = key.topk(min(size + 1, n), largest=False).indices
    outside = lowest[size:] if n > size else place.new_full((1,), n)
    return lowest[:size].sort().values, outside


def _first(rows: Tensor, scale: Tensor) -> Tensor:
    """Find the row whose nearest other one is farthest away, `[1]`, a chunk at a time."""
    from mmfast.kernels.max_min_select import nearest_other

    n = len(scale)
    step = max(1, _CHUNK // n)
    parts = [
        nearest_other(_product(part, rows[:n])[None], scale[None], i * step, store=False)[0]
        for i, part in enumerate(rows[:n].split(step))
    ]
    return torch.cat(parts).argmin(keepdim=True)


def max_min_plain(similarity: Tensor, first: Tensor, count: int) -> Tensor:
    """Picks `[B, count]` after the `first` `[B]` by `similarity` `[B, N, N]`, step by step."""
    batch = torch.arange(len(similarity), device=similarity.device)
    nearest = torch.full_like(similarity[:, 0], -torch.inf)  # [B, N]
    picks = [first]
    while True:
        nearest = torch.maximum(nearest, similarity[batch, picks[-1]])
        nearest[batch, picks[-1]] = torch.inf
        if len(picks) == count:
            return torch.stack(picks, -1)
        picks.append(nearest.argmin(-1))


def max_min_reference(x: Tensor, count: int) -> Tensor:
    """Picks `[count]` of the DivPrune reference for `x` `[N, D]`, which may pick rows again."""
    rows = x / x.norm(dim=-1, keepdim=True)
    distance = 1.0 - rows @ rows.T  # [N, N]
    nearest = distance.topk(2, dim=0, largest=False).values[1]  # the smallest is the row itself
    picks = [int(nearest.argmax())]
    closest = distance[picks[0]].clone()
    while len(picks) < count:
        picks.append(int(closest.argmax()))
        torch.minimum(closest, distance[picks[-1]], out=closest)
    return torch.tensor(picks[:count], dtype=torch.int64, device=x.device)


def greedy_diverse(
    score: Tensor, x: Tensor, count: int, balance: float, start: Tensor | None = None
) -> Tensor:
    """Pick `count` rows, each with the best score less its likeness to the picks before it.

    A row's worth is `balance * score - (1 - balance) * likeness`, the likeness its largest cosine
    with a pick, the score `[N]` of the order of a cosine: see `rescale`. `start` is picked
    beforehand. Returns `[count]` int64 in order; ties go to the lowest index.
    """
    own = balance * score.double()
    first = [] if start is None else start.tolist()
    if x.device.type != "cpu":
        return _stepwise(own, x, count, 1 - balance, first)
    rows = unit_rows(x.double())
    return LazyGreedy(rows, count, own.numpy(), 1 - balance, ROUNDING).run(first)


def _stepwise(own: Tensor, x: Tensor, count: int, share: float, start: list[int]) -> Tensor:
    """Pick from the table of all cosines, without waiting for the device."""
    table = cosine_table(x, x)
    likeness = torch.full_like(own, -1.0)
    picks = torch.empty(count, dtype=torch.int64, device=x.device)
    free = torch.zeros_like(own)  # -inf once picked
    for step in range(count):
        if step < len(start):
            picks[step] = start[step]
        else:
            picks[step : step + 1] = (own - share * likeness + free).argmax(keepdim=True)
        pick = picks[step : step + 1]
        likeness = torch.maximum(likeness, table.index_select(0, pick)[0])
        free.index_fill_(0, pick, -torch.inf)
    return picks
