"""Bipartite soft matching: pair tokens at even places with their most similar one at odd places."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmfast.ops.gather_rows import gather_rows
from mmfast.ops.nearest import nearest_rows
from mmfast.ops.ranking import stable_topk
from mmfast.ops.unit import unit_rows

# Cosines this close to 1 differ by rounding only; as true ties they go to the lowest index.
_SAME = 1.0 - 2.0**-20


@dataclass(frozen=True)
class Matching:
    """Which even tokens are merged. Token = 2 * i for A position i, 2 * j + 1 for B position j.

    Attributes:
        unmerged: `[..., a - r]` A positions that stay, most similar first; ascending where there
            is a class token.
        source: `[..., r]` A positions that are merged, most similar first.
        target: `[..., r]` the B position each of them joins.
    """

    unmerged: Tensor
    source: Tensor
    target: Tensor


def match(
    metric: Tensor, count: int, *, class_token: bool = False, distill_token: bool = False
) -> Matching:
    """Choose the `count` even tokens most similar to an odd one.

    Args:
        metric: Similarity features `[..., N, d]`; cosine is taken.
        count: Merges r, at most `(N - protected) // 2`.
        class_token: Token 0 is never merged.
        distill_token: Nothing is merged into token 1.
    """
    rows = unit_rows(metric)
    even, odd = rows[..., ::2, :], rows[..., 1::2, :]
    partner = nearest_rows(even, odd, not_first=distill_token)  # [..., a]
    # Once more, row by row: equal pairs then have equal bits, and the lowest index wins.
    best = torch.linalg.vecdot(even, gather_rows(odd, partner)).clamp(max=_SAME)
    if class_token:
        best[..., 0] = -torch.inf
    rank = stable_topk(best, best.shape[-1])
    source, unmerged = rank[..., :count], rank[..., count:]
    if class_token:
        unmerged = unmerged.sort(dim=-1).values
    return Matching(unmerged, source, partner.gather(-1, source))
