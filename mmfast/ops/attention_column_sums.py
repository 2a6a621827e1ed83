"""Attention received: column sums of the softmax, without the matrix of attention weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from mmfast.core.errors import SpecError

# Logits computed at a time. On a CPU 4 MB, which stay in its cache; a GPU wants fewer launches.
_TILE = {"cpu": 1 << 20, "cuda": 1 << 24}
_FEWEST = 64  # queries at a time that keep a matrix product busy
_LOG2_E = 1.4426950408889634
Extra = Sequence[Tensor | None]  # lse [b, H, L], mask [b, H, L, S] and weights [b, H, L]


def in_chunks(
    query: Tensor,
    key: Tensor,
    lse: Tensor | None,
    scale: float,
    causal: bool,
    mask: Tensor | None,
    weights: Tensor | None,
    queries: tuple[int, int] | None,
    spans: Tensor | None,
    per_query: bool,
) -> Tensor:
    """`[B, H, S]` or `[B, Hkv, S]`; arguments are those of `attention_column_sums`."""
    items, heads, length, _ = query.shape
    shared, size = key.shape[1:3]
    kind = torch.promote_types(torch.float32, query.dtype)
    each = heads // shared if per_query else 1
    out = torch.zeros(items, shared, each, size, dtype=kind, device=query.device)
    if mask is not None:
        mask = mask.expand(items, heads, length, size)
    tile = _TILE["cuda" if query.is_cuda else "cpu"]
    many = max(1, tile // max(1, heads * length * size))  # rows that fit a tile together
    pieces = [(slice(row, row + many), slice(None)) for row in range(0, items, many)]
    if spans is not None:
        pieces = [(slice(row, row + 1), slice(i, j)) for row, i, j in spans.tolist()]
    work = _Workspace(kind, query.device, tile, scale * _LOG2_E, causal, queries)
    for rows, tokens in pieces:
        extra = (
            None if lse is None else lse[rows, :, tokens],
            None if mask is None else mask[rows],
            None if weights is None else weights[rows, :, tokens],
        )
        work.add(out[rows, ..., tokens], query[rows, :, tokens], key[rows, :, tokens], extra)
    return out.flatten(1, 2)


@dataclass
class _Workspace:
    """Options and buffers of one call: allocating per chunk costs more than the arithmetic."""

    kind: torch.dtype
    device: torch.device
    tile: int
    scale: float
    causal: bool
    queries: tuple[int, int] | None
    held: dict[str, Tensor] = field(default_factory=dict)

    def add(self, out: Tensor, query: Tensor, key: Tensor, extra: Extra) -> None:
        """Add to `out` `[b, Hkv, G or 1, S]` the attention of the keys, from each head or group.

        A small problem is one step, a larger one goes head of keys by head of keys.
        """
        heads, length, size = query.shape[1], query.shape[2], key.shape[2]
        shared, (begin, end) = key.shape[1], self.queries or (0, length)
        if len(query) * heads * length * size <= self.tile:
            self._step(out, query, key, extra, begin, end)
            return
        group = heads // shared
        step = max(1, max(_FEWEST, self.tile // size) // group)
        if self.causal:  # in small steps, since each makes all the logits that its last query sees
            step = min(step, max(_FEWEST, min(256, length // 8)))
        for head in range(len(query) * shared):
            row, own = slice(head // shared, head // shared + 1), head % shared
            mine, key_head = slice(own * group, (own + 1) * group), slice(own, own + 1)
            parts = out[row, key_head], query[row, mine], key[row, key_head]
            some = [x if x is None else x[row, mine] for x in extra]
            for first in range(begin, end, step):
                self._step(*parts, some, first, min(first + step, end))

    def _step(
        self, out: Tensor, query: Tensor, key: Tensor, extra: Extra, first: int, last: int
    ) -> None:
        """Add queries `first` to `last`; powers of two cost half of what exponentials cost."""
        lse, mask, weights = extra
        size, offset = key.shape[2], key.shape[2] - query.shape[2]
        seen = min(size, last + offset) if self.causal else size
        if seen <= 0 or first >= last:
            return
        logits = self._logits(query[:, :, first:last], key[:, :, :seen])
        if mask is not None:
            _hide(logits, mask[:, :, first:last, :seen])
        if self.causal:
            _hide_later(logits, first + offset)
        level = logits.amax(-1) if lse is None else lse[..., first:last].to(self.kind) * _LOG2_E
        torch.nan_to_num_(level, nan=0.0, neginf=0.0)  # a query that sees no key
        logits.sub_(level[..., None]).exp2_()
        factor = torch.ones_like(level) if weights is None else weights[..., first:last]
        if lse is None:
            factor = factor / logits.sum(-1).clamp_min_(torch.finfo(self.kind).tiny)
        shares = logits.view(out[..., 0].numel(), -1, seen)
        parts = _product(factor.reshape(len(shares), 1, -1), shares)
        out[..., :seen] += parts.view(out[..., :seen].shape)

    def _logits(self, query: Tensor, key: Tensor) -> Tensor:
        """`[b, H, c, S]` of queries `[b, H, c, D]` and keys `[b, Hkv, S, D]`."""
        (items, heads, count, width), shared, size = query.shape, *key.shape[1:3]
        rows = self._buffer("queries", query.numel()).view(query.shape)
        rows.copy_(query).mul_(self.scale)
        logits = self._buffer("logits", items * heads * count * size).view(items * shared, -1, size)
        keys = key.to(self.kind).reshape(items * shared, size, width)
        _product(rows.view(items * shared, -1, width), keys.transpose(1, 2), logits)
        return logits.view(items, heads, count, size)

    def _buffer(self, name: str, count: int) -> Tensor:
        held = self.held.get(name)
        if held is None or len(held) < count:
            held = self.held[name] = torch.empty(count, dtype=self.kind, device=self.device)
        return held[:count]


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched product, without `out` of single rows; a batch of one is multiplied directly."""
    if len(a) > 1:
        return torch.bmm(a, b, out=out)
    if out is None:
        return torch.mv(b[0].T, a[0, 0])[None, None]
    return torch.mm(a[0], b[0], out=out[0])[None]


def _hide(logits: Tensor, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        logits.masked_fill_(~mask, -torch.inf)
    else:
        logits.add_(mask, alpha=_LOG2_E)


def _hide_later(logits: Tensor, last: int) -> None:
    """Hide from query i of `[..., c, S]` the keys after `last + i`."""
    begin = max(0, last + 1)
    corner = logits[..., begin:]
    if corner.shape[-1]:
        later = torch.ones(corner.shape[-2:], dtype=torch.bool, device=logits.device)
        corner.masked_fill_(later.triu_(last + 1 - begin), -torch.inf)


Heads = Literal["all", "key", "query"]

# What the Triton kernel takes without spilling.
_WIDEST = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 64}


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

    Computed in float32 (float64 for float64). A CUDA device takes a Triton kernel wherever there is
    no mask; everything else goes chunk by chunk through torch. Queries `[B, H, L, D]` and keys `[B,
    Hkv, S, D]`, H a multiple of Hkv, share keys in place; `causal` lets query i see the keys up to
    `S - L + i`. `lse` `[B, H, L]` float32 is the log-sum-exp of the scaled and masked logits, as
    `attend` gives it; None: found here, which costs a CUDA device another pass. `mask` is bool
    (True = visible) or an addend to the logits; `weights`, broadcast to `[B, H, L]`, are factors of
    the queries, of which `queries` takes a range only.

    Where L = S, `lengths` `[B]` are the tokens of every row that count, or, where B = 1,
    `cu_seqlens` `[n + 1]` the bounds of n packed sequences, each attending to itself only;
    `longest`, at least their largest length, spares empty work. `heads` sums over `all`, over those
    that share keys (`key`), or none (`query`): `[B, S]`, `[B, Hkv, S]` or `[B, H, S]`. A query that
    sees nothing gives nothing, and a key outside of all sequences receives nothing.
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
