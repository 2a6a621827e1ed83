"""Plain formulas of operations that the package computes in parts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def segment_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Softmax attention segment by segment; arguments as for `ops.attention.segment_attention`."""
    out = torch.empty_like(v)
    bounds = ends.tolist()
    for start, stop in pairwise(bounds):
        part = slice(start, stop)
        logits = torch.einsum("qhd,khd->hqk", q[part], k[part]) * scale
        if bias is not None:
            logits = logits + bias[part]
        out[part] = torch.einsum("hqk,khd->qhd", logits.softmax(-1), v[part])
    return out


def attention_column_sums_reference(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Column sums from the whole matrix: sum over queries i of `w_i softmax(q_i k^T)`.

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
    logits = (
        query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    )  # [B, H, L, S]
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    if causal:
        seen = torch.ones(length, size, dtype=torch.bool, device=query.device).tril(size - length)
        logits = logits.masked_fill(~seen, -torch.inf)
    shares = logits.softmax(-1).nan_to_num(0.0)
    return (shares if weights is None else shares * weights[..., None]).sum(2)


def undelay(steps: Tensor, delays: Sequence[int]) -> Tensor:
    """Return the whole frames `[B, Q, S - max]` of steps `[B, Q, S]`."""
    shifts = list(delays)
    frames = max(steps.shape[2] - max(shifts), 0)
    rows = [steps[:, book, shift : shift + frames] for book, shift in enumerate(shifts)]
    return torch.stack(rows, dim=1)


def selected_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    real: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float,
) -> Tensor:
    """Dense attention in float64 under a mask of the chosen entries, 0 where there are none.

    Arguments and result are those of `ops.pages.selected_attention`; no place is chosen twice.
    """
    (items, shared, n, _), heads = keys.shape, query.shape[1]
    rows = query.double().unflatten(1, (shared, -1))  # [B, H, G, 1, d]
    logits = (rows @ keys.double().transpose(2, 3)[:, :, None]) * scale
    if bias is not None:
        more = bias.double().expand(items, heads, n).unflatten(1, (shared, -1))
        logits = logits + more[:, :, :, None]
    seen = torch.zeros(items, shared, n, dtype=torch.bool)
    for item in range(items):
        for head in range(shared):
            places = index.expand(items, shared, -1)[item, head]
            if real is not None:
                places = places[real.expand(items, shared, -1)[item, head]]
            seen[item, head, places] = True
    logits = logits.masked_fill(~seen[:, :, None, None], -torch.inf)
    weights = logits.softmax(-1).nan_to_num(nan=0.0)
    found: Tensor = (weights @ values.double()[:, :, None]).flatten(1, 2)
    return found
