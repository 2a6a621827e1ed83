"""Queries of grouped heads, as their key head sees them."""

from __future__ import annotations

from torch import Tensor


def group_queries(query: Tensor, heads: int) -> Tensor:
    """Split `[Hq, T, d]` into `[H, Hq / H, T, d]`: neighbouring query heads share a key head."""
    groups: Tensor = query.unflatten(0, (heads, query.shape[0] // heads))
    return groups
