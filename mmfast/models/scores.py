"""Importance of keys: softmax rows recomputed from q and k in float32, never L x L at once.

What many queries give in sum goes through `mmfast/ops/attention_column_sums.py`; a few rows, and
masks that only a rule knows, are plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from mmfast.models.softmax_rows import HIDDEN, bias_of, softmax_rows
from mmfast.ops.attention_column_sums import attention_column_sums

# Logits held at a time: 16 MB of float32, about the size of a last-level cache.
_CHUNK = 1 << 22

# Fewer queries than this are a window: their rows are made as they are.
_FEW = 64


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
    bias = bias_of(mask, query, key, last, is_causal=False)
    return softmax_rows(query[:, :, -1:], key, bias, scaling).mean(dim=(1, 2))


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
            visible = (bias[0] > HIDDEN / 2).any(dim=0)
        yield weights.mean(dim=0), visible


def head_mass(
    query: Tensor,
    key: Tensor,
    row: int,
    places: Tensor,
    mask: Any = None,
    scaling: float | None = None,
    is_causal: bool = True,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention that the keys of each KV head receive from some queries of one batch row.

    Arguments are those of `rows_of`, and `lse` `[B, H, L]`, where the attention function gave it.

    Returns:
        `[Hkv, S]` float32: sum over the queries, mean over the query heads that share a KV head.
    """
    heads, size = key.shape[1], key.shape[2]
    if len(places) >= _FEW and _direct(mask, query):
        one = slice(row, row + 1)
        if mask is not None and len(mask) > 1:
            mask = mask[one]
        weights = query.new_zeros(1, 1, query.shape[2], dtype=torch.float32)
        weights.index_fill_(2, places, 1.0)
        seen, causal = _visible(mask, size, is_causal)
        sums = attention_column_sums(
            query[one], key[one], None if lse is None else lse[one], scale=scaling, causal=causal,
            mask=seen, weights=weights, queries=_range(places), heads="key",
        )  # fmt: skip
        return sums[0].float() / (query.shape[1] // heads)
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
        bias = bias_of(mask, mine, keys, some, is_causal, row)
        yield softmax_rows(mine.index_select(2, some), keys, bias, scaling)[0], bias


def received(
    query: Tensor,
    key: Tensor,
    scaling: float | None = None,
    is_causal: bool = False,
    mask: Any = None,
    lse: Tensor | None = None,
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
        lse: `[B, H, L]` log-sum-exp of every query, where the attention function gave it.

    Returns:
        `[B, S]` float32, each row sums to 1.
    """
    if not _direct(mask, query):
        return _received_by_rows(query, key, scaling, is_causal, mask)
    heads, length, size = query.shape[1], query.shape[2], key.shape[2]
    seen, causal = _visible(mask, size, is_causal)
    live, count = None, query.new_full((1, 1), min(length, size) if causal else length).float()
    if seen is not None:
        real = seen.amax(-1) > HIDDEN / 2 if seen.is_floating_point() else seen.any(-1)
        if mask.ndim == 2:  # a padding query is blind, so that it does not count in the mean
            real = seen[:, :, 0, size - length :]
        live = real.float().expand(-1, -1, length)
        count = live.mean(1).sum(1, keepdim=True)
    sums = attention_column_sums(
        query, key, lse, scale=scaling, causal=causal, mask=seen, weights=live
    )
    return sums.float() / heads / count.clamp_min(1)


def received_within(
    query: Tensor, key: Tensor, ends: Tensor, scaling: float | None = None
) -> Tensor:
    """`received` of packed sequences that attend to themselves, in one pass.

    Args:
        query: `[1, H, L, d]`.
        key: `[1, Hkv, L, d]`, H a multiple of Hkv.
        ends: `[n + 1]` where each sequence begins and the last one ends.
        scaling: Factor of the logits; None means `d ** -0.5`.

    Returns:
        `[1, L]` float32; the keys of each sequence sum to 1.
    """
    sizes = ends.diff().to(query.device, torch.int64)
    longest = int(sizes.max())
    sums = attention_column_sums(query, key, scale=scaling, cu_seqlens=ends, longest=longest)
    own = sizes.repeat_interleave(sizes, output_size=query.shape[2])
    return sums.float() / query.shape[1] / own


def _direct(mask: Any, query: Tensor) -> bool:
    """Whether the sums over columns take this mask: a GPU's kernel has none."""
    return mask is None or (isinstance(mask, Tensor) and not query.is_cuda)


def _visible(mask: Tensor | None, size: int, is_causal: bool) -> tuple[Tensor | None, bool]:
    """The mask `[B or 1, 1 or H, L or 1, S]`, and whether the order of tokens counts besides."""
    if mask is None:
        return None, is_causal
    if mask.ndim == 4:
        return mask[..., :size], False
    return (mask[:, -size:] != 0)[:, None, None], is_causal


def _range(places: Tensor) -> tuple[int, int] | None:
    """The queries that ascending places span; a GPU is not waited for, it takes them all."""
    return None if places.is_cuda else (int(places[0]), int(places[-1]) + 1)


def _received_by_rows(
    query: Tensor, key: Tensor, scaling: float | None, is_causal: bool, mask: Any
) -> Tensor:
    """`received` under any mask."""
    batch, heads, length, _ = query.shape
    size = key.shape[2]
    step = max(1, _CHUNK // max(1, batch * heads * size))
    total = torch.zeros(batch, size, dtype=torch.float32, device=query.device)
    count = torch.zeros(batch, 1, dtype=torch.float32, device=query.device)
    for start in range(0, length, step):
        stop = min(start + step, length)
        places = torch.arange(start, stop, device=query.device)
        bias = bias_of(mask, query, key, places, is_causal)
        weights = softmax_rows(query[:, :, start:stop], key, bias, scaling)  # [B, H, c, S]
        if bias is None:
            count += stop - start
        else:
            live = (bias.amax(dim=-1, keepdim=True) > HIDDEN / 2).float()
            live = live.expand(-1, -1, stop - start, -1)  # [B or 1, 1 or H, c, 1]
            weights = weights * live
            count += live.mean(dim=1).sum(dim=1)  # [B or 1, 1]
        total += weights.sum(dim=2).mean(dim=1)
    return total / count.clamp_min(1)
