"""Bytes of the tensors that some work makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Bytes of the tensors that operations made; what only looks at one or fills it makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            self.bytes += [x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor)]
        return out


def made(work: Callable[[], Any]) -> tuple[list[int], Any]:
    """Bytes of tensors made by work, the largest first, and its result."""
    with Made() as seen:
        found = work()
    return sorted(seen.bytes, reverse=True), found
