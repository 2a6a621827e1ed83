"""Online clusters of bit strings: who founds one, and who joins which."""

from __future__ import annotations

import torch
from torch import Tensor


def leader_clusters(bits: Tensor, radius: int) -> Tensor:
    """Cluster rows in order: a row joins the nearest earlier founder, or founds a cluster.

    A row founds a cluster if it differs from every earlier founder in at least `radius` bits;
    else it joins the nearest one (of equally near ones the earliest). Whether a row founds one
    depends on earlier rows only, so the question is settled for all rows at once in rounds, as
    many as the longest chain of rows that decide about each other: a few, not one per row.

    Args:
        bits: `[n, P]` bool.
        radius: Distances below it join.

    Returns:
        `[n]` int64, clusters numbered by their founders' order.
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
