"""The log-sum-exp that an attention function finds and throws away, caught as it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmfast.ops.attend import attend


class Levels(TorchFunctionMode):
    """While entered, in this thread, `scaled_dot_product_attention` leaves its log-sum-exp here.

    The output is what it would be, bit for bit: the same kernel runs, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._found: list[Tensor | None] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Stand in the place of sdpa where it is called without dropout."""
        given = dict(kwargs or {})
        plain = not given.get("dropout_p") and len(args) == 3
        if func is not F.scaled_dot_product_attention or not plain:
            return func(*args, **given)
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        query, key, value = args
        out, level = attend(query, key, value, mask, causal, given.get("scale"))
        self._found.append(level)
        return out

    def of(self, query: Tensor) -> Tensor | None:
        """`[B, H, L]` for queries `[B, H, L, d]`, or None where that cannot be told."""
        if len(self._found) != 1 or self._found[0] is None:
            return None
        return self._found[0] if self._found[0].shape == query.shape[:3] else None
