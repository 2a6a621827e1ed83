"""Max-min selection as its formula says, and as its authors wrote it, repeated picks included."""

from __future__ import annotations

import torch
from torch import Tensor


def max_min_plain(similarity: Tensor, first: Tensor, count: int) -> Tensor:
    """Pick the row least similar to all picks so far, `count` times, a step in Python each.

    Args:
        similarity: `[B, N, N]`; the diagonal is not looked at.
        first: `[B]` int64, the first pick of each item.
        count: Picks per item, at most N.

    Returns:
        `[B, count]` int64 in the order of picking; no row twice, ties to the lowest index.
    """
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
    """Picks of the DivPrune reference, in the order of picking: `[count]` for `x` `[N, D]`.

    Nothing keeps a picked row from being picked again, which happens as soon as every row equals
    a pick. The running minimum gives the picks of the reference, which takes it anew each time.
    """
    rows = x / x.norm(dim=-1, keepdim=True)
    distance = 1.0 - rows @ rows.T  # [N, N]
    nearest = distance.topk(2, dim=0, largest=False).values[1]  # the smallest is the row itself
    picks = [int(nearest.argmax())]
    closest = distance[picks[0]].clone()
    while len(picks) < count:
        picks.append(int(closest.argmax()))
        torch.minimum(closest, distance[picks[-1]], out=closest)
    return torch.tensor(picks, device=x.device)
