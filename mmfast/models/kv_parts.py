"""The part of keys, values and mask that a query is to see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmfast.core.errors import ModelError


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
    wide = index[:, None, :, None]
    key, value = (x.gather(2, wide.expand(*x.shape[:2], -1, x.shape[3])) for x in (key, value))
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


def _hidden(module: Any, query: Tensor, mask: Any, read: Tensor) -> Tensor:
    """A mask `[B, 1, L, S]` that hides the others instead."""
    kind = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
    if "flash" in kind:
        raise ModelError(
            "rows of this batch read different numbers of entries, which flash attention cannot; "
            "ask one by one, or call model.set_attn_implementation('sdpa')"
        )
    seen = read[:, None, None]
    length, size = query.shape[2], read.shape[1]
    if mask is None and length > 1:
        causal = torch.ones(length, size, dtype=torch.bool, device=read.device)
        seen = seen & causal.tril(size - length)
    if mask is not None and mask.dtype == torch.bool:
        return seen & mask[..., :size]
    if mask is None and kind != "eager":
        return seen
    low = torch.finfo(query.dtype).min
    base = torch.zeros(1, dtype=query.dtype, device=query.device) if mask is None else mask
    return (
        base[..., :size].masked_fill(~seen, low)
        if mask is not None
        else (
            torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, low)
        )
    )
