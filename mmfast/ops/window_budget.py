"""Share a token budget among static windows and the frames' other tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.ops.ranking import stable_topk


@dataclass
class Quota:
    """What is kept of a video of T frames with n places.

    Attributes:
        clusters: Clusters of each window.
        chosen: `[T, n]` bool, tokens that are not static and stay.
        released: `[T, n]` bool, static tokens that leave their mean and stay for themselves.
    """

    clusters: list[int]
    chosen: Tensor
    released: Tensor


def paper_quota(places: list[int], dynamic: Tensor, attn: Tensor, ratio: float) -> Quota:
    """Counts of the paper: clusters are rounded, the most attended of a frame are rounded up.

    Args:
        places: Static places of each window.
        dynamic: `[T, n]` bool, tokens that are not static.
        attn: `[T, n]` scores.
        ratio: Share to keep of what static merging leaves.
    """
    score = attn.masked_fill(~dynamic, -torch.inf)
    rank = stable_topk(score, dynamic.shape[-1]).argsort(-1)
    quota = [math.ceil(int(count) * ratio) for count in dynamic.sum(-1)]
    chosen = (rank < torch.tensor(quota, device=rank.device)[:, None]) & dynamic
    return Quota([round(count * ratio) for count in places], chosen, torch.zeros_like(chosen))


def exact_quota(
    quota: Quota, places: list[int], dynamic: Tensor, late: Tensor, attn: Tensor, budget: int
) -> Quota:
    """Move a quota to exactly `budget` tokens.

    Too many: the least attended chosen tokens go, then clusters of the fullest window. Too few:
    the most attended tokens left out come back, then clusters where most places share one, and
    at last, with everything kept, static tokens leave their mean, most attended first.

    Args:
        quota: Counts to start from.
        places: Static places of each window.
        dynamic: `[T, n]` bool, tokens that are not static.
        late: `[T, n]` bool, static tokens after the first frame of their window.
        attn: `[T, n]` scores.
        budget: Tokens to keep, at most `T * n`.
    """
    clusters = list(quota.clusters)
    missing = budget - sum(clusters) - int(quota.chosen.sum())
    number = max(int(quota.chosen.sum()) + min(missing, 0), 0)
    chosen = _best(quota.chosen, attn, number)
    missing = budget - sum(clusters) - number
    if missing > 0:
        chosen = chosen | _best(dynamic & ~chosen, attn, missing)
    missing = budget - sum(clusters) - int(chosen.sum())
    while missing < 0:
        clusters[clusters.index(max(clusters))] -= 1
        missing += 1
    while missing > 0 and clusters != places:
        room = [size - used for size, used in zip(places, clusters, strict=True)]
        clusters[room.index(max(room))] += 1
        missing -= 1
    return Quota(clusters, chosen, _best(late, attn, missing))


def _best(candidates: Tensor, attn: Tensor, count: int) -> Tensor:
    """The `count` most attended candidates `[T, n]`, or all of them if they are fewer."""
    count = min(count, int(candidates.sum()))
    best = torch.zeros_like(candidates).flatten()
    best[stable_topk(attn.masked_fill(~candidates, -torch.inf).flatten(), count)] = True
    return best.reshape(candidates.shape)
