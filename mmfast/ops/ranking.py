"""Ranking by score with a defined order of ties, and shares of a budget in whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmfast.core.errors import MmfastError
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens


def stable_topk(score: Tensor, count: int) -> Tensor:
    """Indices `[..., count]` of the highest scores `[..., N]`, best first; ties: lowest index."""
    return score.sort(dim=-1, descending=True, stable=True).indices[..., :count]


Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class RoughScores:
    """Scores in float32 that are near exact ones, which are computed where the order hangs on them.

    They are arrays in host memory: on few of them a call costs a fifth of one on tensors.

    Attributes:
        score: `[..., N]` in the order of memory, finite or infinity.
        error: The most by which an exact score is greater or less.
        exact: From K places `[K]` among all of `score`, laid out in one row, to their exact scores
            `[K]` float64; None where `score` has them.
    """

    score: Numbers
    error: float = 0.0
    exact: Callable[[Numbers], Numbers] | None = None

    def all(self) -> Tensor:
        """The exact scores `[..., N]` of all entries."""
        exact = self.score
        if self.exact is not None:
            exact = self.exact(np.arange(exact.size)).reshape(exact.shape)
        return torch.from_numpy(exact)


def lengths_at(x: Tensor, *some: Numbers) -> Numbers:
    """Lengths `[K]` in float64 of rows of `x` `[..., N, d]` float32, at places among all of them.

    The places are `[K]` together.
    """
    places, table = some[0] if len(some) == 1 else np.concatenate(some), x.detach().numpy()
    if x.is_contiguous():
        rows = table.reshape(-1, x.shape[-1])[places]
    else:
        rows = table[np.unravel_index(places, x.shape[:-1])]
    found: Numbers = np.sqrt(np.einsum("kd,kd->k", rows, rows, dtype=np.float64))
    return found


def row_maxima(values: Numbers, rows: Numbers, count: int) -> Numbers:
    """The greatest of the values `[K]`, none below 0, in each of `count` rows; 0 without any."""
    found = np.zeros(count)
    np.maximum.at(found, rows, values)
    return found


def best_places(score: Tensor | RoughScores, count: int) -> Tensor:
    """Ascending indices `[..., count]` of the highest scores `[..., N]`; ties: lowest index.

    The same entries as of `stable_topk`, five times sooner on a CPU.
    """
    if isinstance(score, Tensor):
        if not score.is_cpu:  # looking for ties takes longer there
            return stable_topk(score, count).sort(dim=-1).values
        bare = score.detach().contiguous()
        score = RoughScores((bare.float() if bare.dtype == torch.bfloat16 else bare).numpy())
    told, error, n = score.score, score.error, score.score.shape[-1]
    if not 0 < count < n:
        return stable_topk(score.all(), count).sort(dim=-1).values
    ranked = told.copy()
    ranked.partition(n - count, -1)
    last = ranked[..., n - count, None]
    # The exact score of the last one is at most `error` away, and so is that of any other one.
    taken = told > last + 2 * error
    stays = told >= last - 2 * error
    places = (stays ^ taken).reshape(-1).nonzero()[0]
    wanted = count - np.add.reduce(taken, -1, dtype=np.int64).reshape(-1)
    if len(places) > wanted.sum():
        row, exact = places // n, told.reshape(-1)[places]
        if score.exact is not None:
            exact = score.exact(places)
        order = np.lexsort((-exact, row))  # row by row, best first, then in the order of places
        late = order[np.arange(len(row)) - np.searchsorted(row, row) >= wanted[row]]
        stays.reshape(-1)[places[late]] = False
    where = stays.reshape(-1).nonzero()[0].reshape(-1, count) - np.arange(0, told.size, n)[:, None]
    return torch.from_numpy(where.reshape(*told.shape[:-1], count))


# Scores and remainders this close differ by rounding only: float64 is a million times finer.
ROUNDING = 2.0**-30


def snap(score: Tensor) -> Tensor:
    """Round a float64 score to multiples of 2^-30, so that equal tokens get equal bits."""
    return (score / ROUNDING).round_().mul_(ROUNDING)


def rescale(score: Tensor) -> Tensor:
    """Lowest to 0, highest to 1 of `[..., N]`, float64 in steps of 2^-30; all 0 where equal."""
    wide = score.double()
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    span = high - low
    return snap((wide - low) / span.masked_fill(span == 0, 1.0))


def outlier_count(score: Tensor) -> int:
    """Count the values of `score` (any shape) above Q3 + 1.5 (Q3 - Q1), linear quartiles."""
    values = score.double().flatten()
    at = torch.tensor([0.25, 0.75], dtype=torch.float64, device=values.device) * (len(values) - 1)
    ranked = values.sort().values
    low, high = at.floor().long(), at.ceil().long()  # torch.quantile refuses 16 million values
    first, third = ranked[low] + (ranked[high] - ranked[low]) * (at - low)
    return int((values > third + 1.5 * (third - first)).sum())


def grouped_topk(score: Tensor, group: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts[..., g]` highest scores of each group g; ties go to the lowest index."""
    score, group = torch.broadcast_tensors(score, group)
    counts = counts.expand(*score.shape[:-1], counts.shape[-1])
    best = score.sort(dim=-1, descending=True, stable=True).indices
    # A second stable sort brings groups together and leaves the best of each in front.
    sorted_group, place = group.gather(-1, best).sort(dim=-1, stable=True)
    order = best.gather(-1, place)
    start = torch.searchsorted(sorted_group.contiguous(), sorted_group.contiguous())
    rank = torch.arange(score.shape[-1], device=score.device) - start
    return torch.zeros_like(score, dtype=torch.bool).scatter_(
        -1, order, rank < counts.gather(-1, sorted_group)
    )


def index_mask(index: Tensor, n: int) -> Tensor:
    """Mark `index` `[..., K]` among `n` entries, `[..., n]` bool."""
    mask = torch.zeros(*index.shape[:-1], n, dtype=torch.bool, device=index.device)
    return mask.scatter_(-1, index, torch.ones_like(index, dtype=torch.bool))


def marked(mask: Tensor) -> Tensor:
    """Ascending indices `[..., M]` of the True entries of `mask` `[..., N]`, M in every row."""
    return mask.nonzero()[:, -1].reshape(*mask.shape[:-1], -1)


def mass_cover(mass: Tensor, share: float) -> Tensor:
    """Mark the fewest entries of each row of `mass` `[..., C]` whose sum reaches `share` of it."""
    if share >= 1:
        return torch.ones_like(mass, dtype=torch.bool)
    ordered, index = mass.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    taken = before < share * ordered.sum(-1, keepdim=True)
    return torch.zeros_like(taken).scatter_(-1, index, taken)


def complement(index: Tensor, n: int) -> Tensor:
    """Ascending indices `[..., n - K]` below `n` that are not in `index` `[..., K]`."""
    taken = index_mask(index, n).to(torch.int8)
    return taken.argsort(dim=-1, stable=True)[..., : n - index.shape[-1]]


def even_spots(count: int, n: int, device: torch.device | None = None) -> Tensor:
    """The middles of `count` equal runs of `n` places, `[count]` int64, all different."""
    return (2 * torch.arange(count, device=device) + 1) * n // (2 * max(1, count))


def one_by_one(reduce: Callable[[Tokens], Reduction], tokens: Tokens) -> Reduction:
    """`reduce` on each item of `tokens` `[..., N, D]`, stacked; all keep the same number."""
    lead = tuple(tokens.x.shape[:-2])
    items = [tokens]
    for size in lead:
        items = [item.select(index) for item in items for index in range(size)]
    return Reduction.stack([reduce(item) for item in items], lead)


def share_out(weights: Tensor, budget: int, caps: Tensor) -> Tensor:
    """Counts in proportion to `weights`, whole and at most `caps`, that sum to exactly `budget`.

    Largest remainder: every group gets its quota rounded down, and those with the largest fractions
    one more; ties go to the lowest index. The surplus of a full group goes to the others in the
    same proportion; groups of weight 0 get equal parts once all others are full. Weights, caps and
    counts are `[..., G]`; an MmfastError says that the groups of a row hold fewer than `budget`.
    """
    weights, caps = torch.broadcast_tensors(weights.double(), caps)
    if bool((caps.sum(-1) < budget).any()):
        raise MmfastError(
            f"cannot share {budget} tokens out among groups that hold {int(caps.sum(-1).min())}"
        )
    quota = _quotas(weights, budget, caps)
    counts = (quota + ROUNDING).floor().long()
    fraction = ((quota - counts) / ROUNDING).round().masked_fill(counts >= caps, -1)
    rank = fraction.sort(dim=-1, descending=True, stable=True).indices.argsort(dim=-1)
    return counts + (rank < budget - counts.sum(-1, keepdim=True)).long()


def _quotas(weights: Tensor, budget: int, caps: Tensor) -> Tensor:
    """Proportional shares, not yet whole numbers; those that reach their cap stay there."""
    full = caps <= 0
    quota = torch.zeros_like(weights)
    for _ in range(weights.shape[-1] + 1):
        left = budget - caps.masked_fill(~full, 0).sum(-1, keepdim=True)
        open_weight = weights.masked_fill(full, 0)
        total = open_weight.sum(-1, keepdim=True)
        open_weight = torch.where(total > 0, open_weight, (~full).double())
        total = open_weight.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        quota = torch.where(full, caps, left * (open_weight / total))
        over = ~full & (quota + ROUNDING >= caps)
        if not bool(over.any()):
            break
        full = full | over
    return quota


def best_of(score: Tensor, among: Tensor, count: Tensor | int) -> Tensor:
    """Mark the `count` (`[..., 1]`, or a number) highest scores `[..., N]` of those `among` (bool).

    All are marked where there are fewer; ties go to the lowest index.
    """
    score, among = torch.broadcast_tensors(score.double(), among)
    order = score.masked_fill(~among, -torch.inf).sort(dim=-1, descending=True, stable=True)
    return among & (order.indices.argsort(dim=-1) < count)


def frame_ranks(frame: Tensor) -> Tensor:
    """Number of the frame of each token in order of appearance, `[..., N]`; -1 where it has none.

    `frame` has any number of 0 or more for each frame, whose tokens lie together but for tokens
    of none, below 0.
    """
    inside = frame >= 0
    place = torch.arange(frame.shape[-1], device=frame.device).expand(frame.shape)
    last = place.masked_fill(~inside, -1).cummax(-1).values.roll(1, -1)
    last[..., :1] = -1  # the token of a frame before each
    begins = inside & ((last < 0) | (frame.gather(-1, last.clamp_min(0)) != frame))
    return (begins.cumsum(-1) - 1).masked_fill(~inside, -1)
