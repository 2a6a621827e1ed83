"""Attention received: column sums of the softmax, without the matrix of attention weights."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mmfast.core.errors import SpecError
from mmfast.ops.column_chunks import in_chunks

Heads = Literal["all", "key", "query"]

# What the Triton kernel takes without spilling.
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 64}


def attention_column_sums_reference(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """The formula, with the whole matrix: sum over queries i of `w_i softmax(q_i k^T)`.

    Args:
        query: `[B, H, L, D]`, of the type to compute in.
        key: `[B, Hkv, S, D]`, H a multiple of Hkv.
        scale: Factor of the logits; None means `D ** -0.5`.
        causal: Query i sees the keys up to `S - L + i`.
        mask: Bool (True = visible) or addend to the logits, broadcast to `[B, H, L, S]`.
        weights: Factor of every query, broadcast to `[B, H, L]`.

    Returns:
        `[B, H, S]`; a query that sees nothing gives nothing.
    """
    length, size = query.shape[2], key.shape[2]
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = query @ keys.transpose(2, 3) * _scale(query, scale)  # [B, H, L, S]
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    if causal:
        seen = torch.ones(length, size, dtype=torch.bool, device=query.device).tril(size - length)
        logits = logits.masked_fill(~seen, -torch.inf)
    shares = logits.softmax(-1).nan_to_num(0.0)
    return (shares if weights is None else shares * weights[..., None]).sum(2)


@torch.no_grad()
def attention_column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    queries: tuple[int, int] | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    longest: int | None = None,
    heads: Heads = "all",
) -> Tensor:
    """Sum over queries of the attention that every key receives; memory does not grow with L x S.

    Computed in float32 (float64 for float64). A CUDA device takes a Triton kernel wherever there
    is no mask; everything else goes chunk by chunk through torch.

    Args:
        query: `[B, H, L, D]`.
        key: `[B, Hkv, S, D]`, H a multiple of Hkv; grouped heads share their keys in place.
        lse: `[B, H, L]` float32, log-sum-exp of the scaled and masked logits of every query, as
            `attend` gives it; None: found here, which costs a CUDA device another pass.
        scale: Factor of the logits; None means `D ** -0.5`.
        causal: Query i sees the keys up to `S - L + i`.
        mask: Bool (True = visible) or addend to the logits, broadcast to `[B, H, L, S]`.
        weights: Factor of every query, broadcast to `[B, H, L]`; 0 leaves it out.
        queries: Only those from the first number up to, not including, the second.
        lengths: `[B]` tokens of every row that count, from its first on, where L = S.
        cu_seqlens: `[n + 1]` where each of n packed sequences begins and the last one ends, where
            B = 1 and L = S; each attends to itself only.
        longest: With either, at least the length of the longest sequence: spares empty work.
        heads: `all`: sum over heads; `key`: over those that share keys; `query`: none.

    Returns:
        `[B, S]`, `[B, Hkv, S]` or `[B, H, S]`, float32 or float64. A query that sees nothing gives
        nothing; a key outside of all sequences receives nothing.

    Raises:
        SpecError: Shapes or options do not go together.
    """
    spans = _spans(query, key, mask, queries, lengths, cu_seqlens)
    if weights is not None:
        weights = weights.to(query.device, torch.promote_types(torch.float32, query.dtype))
        weights = weights.expand(query.shape[:3])
    if _fits_kernel(query, key, mask):
        sums = _on_cuda(query, key, lse, _scale(query, scale), causal, weights, queries, spans,
                        longest)  # fmt: skip
    else:
        sums = in_chunks(query, key, lse, _scale(query, scale), causal, mask, weights, queries,
                          spans, heads == "query")  # fmt: skip
    if heads == "query":
        return sums
    return sums.sum(1) if heads == "all" else sums.unflatten(1, (key.shape[1], -1)).sum(2)


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _spans(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    queries: tuple[int, int] | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Tensor | None:
    """`[n, 3]` int32, batch row, first token and end of every sequence; None: whole rows."""
    if query.shape[1] % key.shape[1] or query.shape[::3] != key.shape[::3]:
        raise SpecError(
            f"queries {list(query.shape)} do not go with keys {list(key.shape)}; "
            "give [B, H, L, D] and [B, Hkv, S, D], H a multiple of Hkv"
        )
    if lengths is None and cu_seqlens is None:
        return None
    if mask is not None or queries is not None or None not in (lengths, cu_seqlens):
        raise SpecError("lengths and cu_seqlens go with no mask, query range or each other")
    if query.shape[2] != key.shape[2]:
        raise SpecError(f"{query.shape[2]} queries, {key.shape[2]} keys; sequences need L = S")
    if lengths is not None:
        ends = lengths.to(query.device, torch.int32)
        rows = torch.arange(len(ends), dtype=torch.int32, device=ends.device)
        return torch.stack([rows, torch.zeros_like(ends), ends], dim=1)
    assert cu_seqlens is not None
    if len(query) != 1:
        raise SpecError(f"packed sequences come in one batch row, not in {len(query)}")
    ends = cu_seqlens.to(query.device, torch.int32)
    return torch.stack([torch.zeros_like(ends[1:]), ends[:-1], ends[1:]], dim=1)


def _fits_kernel(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    plain = mask is None and query.dtype == key.dtype and min(query.numel(), key.numel()) > 0
    return query.is_cuda and plain and query.shape[-1] <= _WIDEST.get(query.dtype, 0)


def _on_cuda(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: bool,
    weights: Tensor | None,
    queries: tuple[int, int] | None,
    spans: Tensor | None,
    longest: int | None,
) -> Tensor:
    from mmfast.kernels import attention_column_sums as kernels

    query, key = (x if x.stride(3) == 1 else x.contiguous() for x in (query, key))
    if weights is not None and weights.stride(2) != 1:
        weights = weights.contiguous()
    with torch.cuda.device(query.device):
        if lse is None:
            lse = kernels.log_sum_exp(query, key, scale, causal, spans, longest)
        sums: Tensor = kernels.attention_column_sums(
            query, key, lse.float().contiguous(), scale, causal, queries, weights, spans, longest
        )
    return sums
