"""Values of many tensors: the state of a stream is a tuple of tuples, tensors and numbers.

Every tensor has the rows of the batch first, so rows can be taken out and put back without knowing
what a state means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def tree_map(function: Callable[..., Tensor], *trees: Any) -> Any:
    """`function` of the tensors at the same place of each tree; the rest is the first one's."""
    first = trees[0]
    if isinstance(first, Tensor):
        return function(*trees)
    if isinstance(first, tuple):
        parts = [tree_map(function, *each) for each in zip(*trees, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first


def take_rows(tree: Any, rows: Tensor) -> Any:
    """Rows `[b]` of every tensor."""
    return tree_map(lambda x: x.index_select(0, rows.to(x.device)), tree)


def where_rows(rows: Tensor, yes: Any, no: Any) -> Any:
    """Of every tensor the rows of `yes` where `rows` (`[B]` bool) says so, else those of `no`."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(rows.to(a.device).view(-1, *[1] * (a.dim() - 1)), a, b)

    return tree_map(pick, yes, no)
