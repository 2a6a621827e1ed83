"""Importance of keys: softmax rows recomputed from q and k in float32, never L x L at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_HIDDEN = torch.finfo(torch.float32).min  # not -inf: a row that sees nothing must not become NaN

# Logits held at a time: 16 MB of float32, about the size of a last-level cache.
_CHUNK = 1 << 22


def last_query_scores(
    query: Tensor, key: Tensor, mask: Any = None, scaling: float | None = None
) -> Tensor:
    """Attention of the last query to every key, averaged over heads.

    Args:
        query: `[B, H, L, d]`; only the last of the L queries is read.
        key: `[B, Hkv, S, d]`, H a multiple of Hkv.
        mask: None, bool (True = visible) or additive `[B | 1, H | 1, L | 1, S or more]`, a padding
            mask `[B, S]` (non-zero = visible), or a flex BlockMask. Without one every key is seen.
        scaling: Factor of the logits; None means `d ** -0.5`.

    Returns:
        `[B, S]` float32, each row sums to 1.
    """
    last = torch.arange(query.shape[2] - 1, query.shape[2], device=query.device)
    bias = _bias(mask, query, key, last, is_causal=False)
    return _softmax(query[:, :, -1:], key, bias, scaling).mean(dim=(1, 2))


def rows_of(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    is_causal: bool = True,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Attention of some queries of one batch row, averaged over heads, a chunk at a time.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, Hkv, S, d]`, H a multiple of Hkv.
        row: Batch row.
        places: `[n]` which of the L queries.
        mask: As for `last_query_scores`.
        scaling: Factor of the logits; None means `d ** -0.5`.
        is_causal: Without a mask, query i sees the keys up to `S - L + i`.

    Yields:
        `[c, S]` float32 that sum to 1 per query, and `[c or 1, S]` True where a query may see a
        key; the c of all chunks add up to n.
    """
    for weights, bias in _row_chunks(query, key, row, places, mask, scaling, is_causal):
        if bias is None:
            visible = torch.ones(1, key.shape[2], dtype=torch.bool, device=key.device)
        else:
            visible = (bias[0] > _HIDDEN / 2).any(dim=0)
        yield weights.mean(dim=0), visible


def head_mass(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    is_causal: bool = True,
) -> Tensor:
    """Attention that the keys of each KV head receive from some queries of one batch row.

    Arguments are those of `rows_of`.

    Returns:
        `[Hkv, S]` float32: sum over the queries, mean over the query heads that share a KV head.
    """
    heads, size = key.shape[1], key.shape[2]
    total = torch.zeros(heads, size, dtype=torch.float32, device=key.device)
    for weights, _ in _row_chunks(query, key, row, places, mask, scaling, is_causal):
        total += weights.unflatten(0, (heads, -1)).sum(2).mean(1)
    return total


def _row_chunks(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any,
    scaling: float | None,
    is_causal: bool,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Softmax rows `[H, c, S]` of one batch row a chunk at a time, and the bias they came with."""
    mine, keys = query[row : row + 1], key[row : row + 1]
    if not isinstance(mask, BlockMask) and mask is not None and len(mask) > 1:
        mask = mask[row : row + 1]
    for some in places.split(max(1, _CHUNK // max(1, query.shape[1] * key.shape[2]))):
        bias = _bias(mask, mine, keys, some, is_causal, row)
        yield _softmax(mine.index_select(2, some), keys, bias, scaling)[0], bias


def received(
    query: Tensor,
    key: Tensor,
    scaling: float | None = None,
    is_causal: bool = False,
    mask: Any = None,
) -> Tensor:
    """Attention every key receives, averaged over queries and heads.

    The queries are taken a chunk at a time, so memory does not grow with L x S. Queries that may
    see no key at all (padding) do not count in the mean.

    Args:
        query: `[B, H, L, d]`.
        key: `[B, Hkv, S, d]`, H a multiple of Hkv.
        scaling: Factor of the logits; None means `d ** -0.5`.
        is_causal: Without a mask, query i sees the keys up to `S - L + i`.
        mask: As for `last_query_scores`.

    Returns:
        `[B, S]` float32, each row sums to 1.
    """
    batch, heads, length, _ = query.shape
    size = key.shape[2]
    step = max(1, _CHUNK // max(1, batch * heads * size))
    total = torch.zeros(batch, size, dtype=torch.float32, device=query.device)
    count = torch.zeros(batch, 1, dtype=torch.float32, device=query.device)
    for start in range(0, length, step):
        stop = min(start + step, length)
        places = torch.arange(start, stop, device=query.device)
        bias = _bias(mask, query, key, places, is_causal)
        weights = _softmax(query[:, :, start:stop], key, bias, scaling)  # [B, H, c, S]
        if bias is None:
            count += stop - start
        else:
            live = (bias.amax(dim=-1, keepdim=True) > _HIDDEN / 2).float()
            live = live.expand(-1, -1, stop - start, -1)  # [B or 1, 1 or H, c, 1]
            weights = weights * live
            count += live.mean(dim=1).sum(dim=1)  # [B or 1, 1]
        total += weights.sum(dim=2).mean(dim=1)
    return total / count.clamp_min(1)


def _bias(
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
        return _hide(rows) if rows.dtype == torch.bool else rows.float().clamp_min(_HIDDEN)
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
    return zeros.masked_fill_(~visible, _HIDDEN)


def _softmax(query: Tensor, key: Tensor, bias: Tensor | None, scaling: float | None) -> Tensor:
    """Softmax rows `[B, H, c, S]`; grouped heads share their keys without a copy per head."""
    batch, heads, count, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.float().reshape(batch, kv_heads, heads // kv_heads * count, width)
    logits = grouped @ key.float().transpose(2, 3)
    logits = logits.mul_(width**-0.5 if scaling is None else scaling)
    logits = logits.reshape(batch, heads, count, key.shape[2])
    return (logits if bias is None else logits.add_(bias)).softmax(dim=-1)
