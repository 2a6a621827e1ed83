"""Run a choice that cannot be batched on the items of a batch."""

from __future__ import annotations

from collections.abc import Callable

from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens


def one_by_one(reduce: Callable[[Tokens], Reduction], tokens: Tokens) -> Reduction:
    """`reduce` on each item of `tokens` `[..., N, D]`, stacked; every item keeps the same number.

    Args:
        reduce: From tokens without leading dims to a Reduction without a mix.
        tokens: Any leading dims.
    """
    lead = tuple(tokens.x.shape[:-2])
    items = [tokens]
    for size in lead:
        items = [item.select(index) for item in items for index in range(size)]
    return Reduction.stack([reduce(item) for item in items], lead)
