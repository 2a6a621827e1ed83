"""Clusters of tokens: density peaks, leaders in Hamming space, blocks, and graph redundancy."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.ranking import snap, stable_topk
from mmfast.ops.similarity import cosine_parts


def dpc_knn(x: Tensor, count: int, neighbours: int, *, few: bool = True) -> tuple[Tensor, Tensor]:
    """Choose `count` cluster centres of `x` `[n, D]` that are dense and far from denser points.

    Distance is Euclidean over the square root of the width; density is `exp(-mean d^2)` over the
    nearest `neighbours` points, the point itself included, which are `count` at most if `few`; a
    point's reach is its distance to the nearest strictly denser point (the largest distance of all
    if there is none). Centres have the greatest product of the two; ties go to the lowest index.
    The noise the reference adds to the density is left out. Returns centres ascending, and of each
    point the number of its nearest centre; a centre belongs to itself.
    """
    distance = _distances(x) / x.shape[-1] ** 0.5
    near = distance.topk(min(neighbours, count if few else len(x)), largest=False).values
    density = (-near.square().mean(-1)).exp()
    denser = density[None, :] > density[:, None]
    reach = distance.masked_fill(~denser, torch.inf).min(-1).values
    reach = torch.where(reach.isinf(), distance.max(), reach)
    centres = stable_topk(density * reach, count).sort().values
    member = distance[:, centres].argmin(-1)
    member[centres] = torch.arange(count, device=x.device)
    return centres, member


def _distances(x: Tensor) -> Tensor:
    """Distances between the rows of `x` `[n, D]`, `[n, n]` float32; exactly 0 for equal rows.

    The product is ten times faster than differences; float64 hides its cancellation.
    """
    rows = x.double()
    product = rows @ rows.T
    square = product.diagonal()
    scale = square[:, None] + square[None, :]
    squared = scale - 2 * product
    return squared.masked_fill(squared <= 1e-13 * scale, 0).sqrt().float()


def leader_clusters(bits: Tensor, radius: int) -> Tensor:
    """Cluster rows `[n, P]` bool in order; `[n]` int64, numbered by their founders' order.

    A row founds a cluster if it differs from every earlier founder in at least `radius` bits; else
    it joins the nearest one (of equally near ones the earliest). That depends on earlier rows only,
    so all rows are settled at once in a few rounds, as many as the longest chain of rows that
    depend on each other.
    """
    n = len(bits)
    own = torch.arange(n, device=bits.device)
    if not n:
        return own
    signs = bits.float() * 2 - 1
    apart = (bits.shape[-1] - signs @ signs.T) / 2  # [n, n] Hamming distance, exact in float32
    near = (apart < radius).tril(-1)
    founder = ~near.any(-1)
    joins = torch.zeros_like(founder)
    while not bool((founder | joins).all()):
        joins |= (near & founder).any(-1)
        founder |= ~(near & ~joins).any(-1)  # all near earlier rows have joined others
    # argmin leaves ties open, so the row's number decides them.
    reach = (apart * n + own).masked_fill(~(near & founder), torch.inf)  # [n, founder]
    rank = founder.cumsum(0) - 1
    return rank[torch.where(founder, own, reach.argmin(-1))]


def best_blocks(score: Tensor, owner: Tensor, budget: int, chunk: int = 1) -> Tensor:
    """Choose the clusters of the `budget` best blocks, `[C]` bool; ties go to the earliest block.

    `owner` `[C]` is the number of each cluster's block, whose score is that of its best cluster.
    `chunk` neighbours are chosen together, by the mean of their scores; at least one group is.
    """
    blocks, index = owner.unique(return_inverse=True)  # ascending, so in time order
    if len(blocks) <= budget:
        return torch.ones_like(owner, dtype=torch.bool)
    best = score.new_full((len(blocks),), -torch.inf).scatter_reduce_(0, index, score, "amax")
    group = torch.arange(len(blocks), device=score.device) // chunk
    sizes = torch.bincount(group)
    mean = torch.zeros(len(sizes), dtype=score.dtype, device=score.device)
    mean = mean.index_add_(0, group, best) / sizes
    chosen = torch.zeros(len(sizes), dtype=torch.bool, device=score.device)
    chosen[stable_topk(mean, max(1, budget // chunk))] = True
    return chosen[group][index]


def information(x: Tensor, rank: float) -> Tensor:
    """Sum over the leading singular directions of `|u| * sigma` of each row of `[..., N, D]`.

    Directions whose singular value is below the share `rank` of the largest are left out; above
    1e-6, where the squares that they are computed from lose their accuracy. Returns `[..., N]`
    float64 in units of the largest singular value, steps of 2^-30.
    """
    rows = x.double()
    if rows.shape[-2] <= rows.shape[-1]:
        square, u = torch.linalg.eigh(rows @ rows.mT)
        part = u.mul_(square.clamp_min(0).sqrt()[..., None, :])  # [..., N, N]
    else:
        square, v = torch.linalg.eigh(rows.mT @ rows)
        part = rows @ v  # [..., N, D]
    sigma = square.clamp_min(0).sqrt()
    largest = sigma.amax(-1, keepdim=True)
    leading = (sigma > rank * largest)[..., None, :]
    total = part.abs_().mul_(leading).sum(-1)
    return snap(total / largest.masked_fill(largest == 0, 1.0))


def even_edges(metric: Tensor, tau: float) -> tuple[Tensor, Tensor, Tensor]:
    """Edges of each token at an even place: degree, sum of their cosines, mean of all cosines.

    An edge joins an even and an odd token of `[..., N, d]`, N >= 2, whose cosine is at least
    `tau`. Each of the three is `[..., ceil(N / 2)]` float64.
    """
    degrees, sums, means = [], [], []
    for table in cosine_parts(metric[..., ::2, :], metric[..., 1::2, :]):
        means.append(table.mean(-1))
        edges = table >= tau
        degrees.append(edges.sum(-1).double())
        sums.append(table.mul_(edges).sum(-1))
    return torch.cat(degrees, -1), torch.cat(sums, -1), torch.cat(means, -1)
