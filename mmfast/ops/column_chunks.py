"""Column sums of a softmax a chunk of queries at a time: matrix products and a few buffers."""

from __future__ import annotations

import torch
from torch import Tensor

# Logits at work at a time. On a CPU 4 MB, which stay in its cache; a GPU wants fewer launches.
_TILE = {"cpu": 1 << 20, "cuda": 1 << 24}
_FEWEST = 64  # queries at a time that keep a matrix product busy
_LOG2_E = 1.4426950408889634


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
    work = _Workspace(kind, query.device, tile)
    for rows, tokens in pieces:
        work.add(
            out[rows, ..., tokens],
            query[rows, :, tokens],
            key[rows, :, tokens],
            None if lse is None else lse[rows, :, tokens],
            None if mask is None else mask[rows],
            None if weights is None else weights[rows, :, tokens],
            scale * _LOG2_E,
            causal,
            queries,
        )
    return out.flatten(1, 2)


class _Workspace:
    """Buffers of one call: allocating them chunk by chunk costs more than the arithmetic."""

    def __init__(self, kind: torch.dtype, device: torch.device, tile: int) -> None:
        self._kind, self._device, self._tile = kind, device, tile
        self._held: dict[str, Tensor] = {}

    def add(
        self,
        out: Tensor,  # [b, Hkv, G or 1, S]
        query: Tensor,  # [b, H, L, D]
        key: Tensor,  # [b, Hkv, S, D]
        lse: Tensor | None,  # [b, H, L]
        mask: Tensor | None,  # [b, H, L, S]
        weights: Tensor | None,  # [b, H, L]
        scale: float,
        causal: bool,
        queries: tuple[int, int] | None,
    ) -> None:
        """Add to `out` what the keys receive, from each head or from all that share them.

        What is small is done at once, else one head of keys after the other.
        """
        heads, length, size = query.shape[1], query.shape[2], key.shape[2]
        shared, (begin, end) = key.shape[1], queries or (0, length)
        if len(query) * heads * length * size <= self._tile:
            self._step(out, query, key, lse, mask, weights, scale, causal, begin, end)
            return
        group = heads // shared
        step = max(1, max(_FEWEST, self._tile // size) // group)
        if causal:  # in small steps, since each makes all the logits that its last query sees
            step = min(step, max(_FEWEST, min(256, length // 8)))
        for head in range(len(query) * shared):
            row, own = slice(head // shared, head // shared + 1), head % shared
            mine, key_head = slice(own * group, (own + 1) * group), slice(own, own + 1)
            level, hidden, factor = (x if x is None else x[row, mine] for x in (lse, mask, weights))
            for first in range(begin, end, step):
                self._step(
                    out[row, key_head], query[row, mine], key[row, key_head], level, hidden,
                    factor, scale, causal, first, min(first + step, end),
                )  # fmt: skip

    def _step(
        self,
        out: Tensor,
        query: Tensor,
        key: Tensor,
        lse: Tensor | None,
        mask: Tensor | None,
        weights: Tensor | None,
        scale: float,
        causal: bool,
        first: int,
        last: int,
    ) -> None:
        """The queries from `first` to `last`; powers of two cost half of what exponentials cost."""
        size, offset = key.shape[2], key.shape[2] - query.shape[2]
        seen = min(size, last + offset) if causal else size
        if seen <= 0 or first >= last:
            return
        logits = self._logits(query[:, :, first:last], key[:, :, :seen], scale)
        if mask is not None:
            _hide(logits, mask[:, :, first:last, :seen])
        if causal:
            _hide_later(logits, first + offset)
        level = (
            lse[..., first:last].to(self._kind) * _LOG2_E if lse is not None else logits.amax(-1)
        )
        torch.nan_to_num_(level, nan=0.0, neginf=0.0)  # a query that sees nothing
        logits.sub_(level[..., None]).exp2_()
        factor = torch.ones_like(level) if weights is None else weights[..., first:last]
        if lse is None:
            factor = factor / logits.sum(-1).clamp_min_(torch.finfo(self._kind).tiny)
        shares = logits.view(out[..., 0].numel(), -1, seen)
        parts = _product(factor.reshape(len(shares), 1, -1), shares)
        out[..., :seen] += parts.view(out[..., :seen].shape)

    def _logits(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """`[b, H, c, S]` of queries `[b, H, c, D]` and keys `[b, Hkv, S, D]`."""
        (items, heads, count, width), shared, size = query.shape, *key.shape[1:3]
        rows = self._buffer("queries", query.numel()).view(query.shape)
        rows.copy_(query).mul_(scale)
        logits = self._buffer("logits", items * heads * count * size).view(items * shared, -1, size)
        keys = key.to(self._kind).reshape(items * shared, size, width)
        _product(rows.view(items * shared, -1, width), keys.transpose(1, 2), logits)
        return logits.view(items, heads, count, size)

    def _buffer(self, name: str, count: int) -> Tensor:
        held = self._held.get(name)
        if held is None or len(held) < count:
            held = self._held[name] = torch.empty(count, dtype=self._kind, device=self._device)
        return held[:count]


def _product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Batched product, without `out` of single rows; a batch of one is none, which is faster."""
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
    """Hide from query i of `[..., c, S]` the keys behind `last + i`."""
    begin = max(0, last + 1)
    corner = logits[..., begin:]
    if corner.shape[-1]:
        later = torch.ones(corner.shape[-2:], dtype=torch.bool, device=logits.device)
        corner.masked_fill_(later.triu_(last + 1 - begin), -torch.inf)
