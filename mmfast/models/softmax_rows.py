"""Softmax rows of some queries under any mask that an attention function takes, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

HIDDEN = torch.finfo(torch.float32).min  # not -inf: a row that sees nothing must not become NaN


def bias_of(
    mask: Any, query: Tensor, key: Tensor, places: Tensor, is_causal: bool, row: int | None = None
) -> Tensor | None:
    """Addend to the logits of the queries at `places` [c]: `[B or 1, 1 or H, c, S]` or None.

    `row` is the batch row where everything but a BlockMask has been cut down to one.
    """
    size = key.shape[2]
    offset = size - query.shape[2]
    if isinstance(mask, BlockMask):
        return _hide(_evaluate(mask, range(len(query)) if row is None else [row], places, size))
    if mask is not None and mask.ndim == 4:
        rows = mask[..., :size]
        rows = rows if mask.shape[2] == 1 else rows.index_select(2, places)
        return _hide(rows) if rows.dtype == torch.bool else rows.float().clamp_min(HIDDEN)
    visible = None
    if is_causal:
        last = places[:, None] + offset
        visible = (torch.arange(size, device=key.device)[None] <= last)[None, None]
    if mask is not None:  # a padding query is blind, so that it does not count in a mean
        real = mask[:, -size:] != 0
        pairs = (real[:, None, :] & real[:, places + offset, None])[:, None]
        visible = pairs if visible is None else visible & pairs
    return None if visible is None else _hide(visible)


def _evaluate(mask: BlockMask, rows: Sequence[int], places: Tensor, size: int) -> Tensor:
    """Rows of a flex mask, whose rule takes indices: `[B, 1, c, S]` bool."""
    b = torch.tensor(list(rows), device=places.device)[:, None, None]
    q = places[None, :, None]
    k = torch.arange(size, device=places.device)[None, None, :]
    rule: Tensor = mask.mask_mod(b, torch.zeros_like(b), q, k)
    return rule.expand(len(rows), len(places), size)[:, None]


def _hide(visible: Tensor) -> Tensor:
    zeros = torch.zeros(visible.shape, dtype=torch.float32, device=visible.device)
    return zeros.masked_fill_(~visible, HIDDEN)


def softmax_rows(query: Tensor, key: Tensor, bias: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax rows `[B, H, c, S]`; grouped heads share their keys without a copy per head."""
    batch, heads, count, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * count, width)
    logits = grouped @ key.float().transpose(2, 3)
    logits = logits.mul_(width**-0.5 if scaling is None else scaling)
    logits = logits.reshape(batch, heads, count, key.shape[2])
    return (logits if bias is None else logits.add_(bias)).softmax(dim=-1)
