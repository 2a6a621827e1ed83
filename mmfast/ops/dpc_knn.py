"""Density-peak clustering with k nearest neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from mmfast.ops.ranking import stable_topk


def dpc_knn(x: Tensor, count: int, neighbours: int) -> tuple[Tensor, Tensor]:
    """Choose `count` cluster centres that are dense and far from denser points.

    Distance is Euclidean over the square root of the width; density is `exp(-mean d^2)` over the
    nearest `min(neighbours, count)` points, the point itself included; a point's reach is its
    distance to the nearest strictly denser point (the largest distance of all if there is none).
    Centres have the greatest product of the two; ties go to the lowest index. The noise the
    reference adds to the density is left out.

    Args:
        x: `[n, D]`.
        count: Number of clusters, 1 to n.
        neighbours: K.

    Returns:
        Centres `[count]` ascending, and for each point `[n]` the number of its nearest centre;
        a centre belongs to itself.
    """
    distance = _distances(x) / x.shape[-1] ** 0.5
    near = distance.topk(min(neighbours, count), largest=False).values
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

    The product is ten times faster than differences; float64 and the final rounding hide its
    cancellation, so equal rows also have equal distances to all others.
    """
    rows = x.double()
    product = rows @ rows.T
    square = product.diagonal()
    scale = square[:, None] + square[None, :]
    squared = scale - 2 * product
    return squared.masked_fill(squared <= 1e-13 * scale, 0).sqrt().float()
