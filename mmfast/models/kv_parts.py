"""The part of keys, values and mask that a query is to see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError
from mmfast.models.kv_drafts import hidden
from mmfast.ops.gather_rows import gather_rows


def parted(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, read: Tensor
) -> tuple[Tensor, Tensor, Any]:
    """Only these entries.

    Args:
        module: The attention module.
        query: `[B, H, L, d]`.
        key: `[B, Hkv, S, d]`; the new ones are at its end.
        value: `[B, Hkv, S, d]`.
        mask: None, bool or additive `[B | 1, 1, L, S]`, or `[B, S or more]` under flash.
        read: `[B, S]` bool, which entries are read.

    Raises:
        ModelError: Rows of a batch read different numbers of entries under an attention that
            takes no mask of its own, or flex attention.
    """
    counts = read.sum(1)
    if mask is not None and not isinstance(mask, Tensor):
        raise ModelError(
            "retrieval cannot cut a flex attention mask; call model.set_attn_implementation('sdpa')"
        )
    if bool((counts != counts[0]).any()):
        return key, value, _hidden(module, query, mask, read)
    index = read.nonzero()[:, 1].view(len(read), -1)  # [B, m]
    if len(index) == 1:
        where = index[0]
        key, value = key.index_select(2, where), value.index_select(2, where)
        mask = None if mask is None else _last(mask, read.shape[1]).index_select(-1, where)
        return key, value, mask
    wide = index[:, None].expand(-1, key.shape[1], -1)  # [B, Hkv, m]
    key, value = gather_rows(key, wide), gather_rows(value, wide)
    if mask is None:
        return key, value, None
    mask = _last(mask, read.shape[1])
    if mask.ndim == 2:
        return key, value, mask.gather(1, index)
    mask = mask.expand(len(index), *mask.shape[1:])
    return key, value, mask.gather(-1, index[:, None, None].expand(*mask.shape[:3], -1))


def _last(mask: Tensor, size: int) -> Tensor:
    """The columns of a mask that belong to the keys."""
    return mask[:, -size:] if mask.ndim == 2 else mask[..., :size]


def _hidden(module: nn.Module, query: Tensor, mask: Any, read: Tensor) -> Any:
    """A mask `[B, 1, L, S]` that hides the others instead."""
    seen = read[:, None, None]
    length, size = query.shape[2], read.shape[1]
    if mask is None and length > 1:
        causal = torch.ones(length, size, dtype=torch.bool, device=read.device)
        seen = seen & causal.tril(size - length)
    return hidden(module, query, mask, seen)
