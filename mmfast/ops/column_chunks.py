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
    """`[B, H, S]` or `[B, Hkv, S]`, one sequence and one head of keys after the other."""
    items, heads, length, _ = query.shape
    shared, size = key.shape[1:3]
    kind = torch.promote_types(torch.float32, query.dtype)
    each = heads // shared if per_query else 1
    out = torch.zeros(items, shared, each, size, dtype=kind, device=query.device)
    if mask is not None:
        mask = mask.expand(items, heads, length, size)
    rows = [(row, 0, None) for row in range(items)] if spans is None else spans.tolist()
    work = _Workspace(kind, query.device, _TILE["cuda" if query.is_cuda else "cpu"])
    for row, begin, end in rows:
        tokens, keys = slice(begin, end), slice(begin, end)
        for head in range(shared):
            group = slice(head * (heads // shared), (head + 1) * (heads // shared))
            work.add(
                out[row, head, :, keys],
                query[row, group, tokens],
                key[row, head, keys],
                None if lse is None else lse[row, group, tokens],
                None if mask is None else mask[row, group],
                None if weights is None else weights[row, group, tokens],
                scale,
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
        out: Tensor,  # [G or 1, S]
        query: Tensor,  # [G, L, D], the heads that share these keys
        key: Tensor,  # [S, D]
        lse: Tensor | None,  # [G, L]
        mask: Tensor | None,  # [G, L, S]
        weights: Tensor | None,  # [G, L]
        scale: float,
        causal: bool,
        queries: tuple[int, int] | None,
    ) -> None:
        """Add to `out` what the keys receive, from each head or from all of them.

        Exponentials are powers of two, which cost half.
        """
        group, length, _ = query.shape
        size, key = len(key), key.to(self._kind)
        begin, end = queries or (0, length)
        step = max(1, max(_FEWEST, self._tile // max(1, size)) // group)
        if causal:  # in small steps, since each makes all the logits that its last query sees
            step = min(step, max(_FEWEST, min(256, length // 8)))
        for first in range(begin, end, step):
            last = min(first + step, end)
            seen = min(size, last + size - length) if causal else size
            if seen <= 0:
                continue
            logits = self._logits(query[:, first:last], key[:seen], scale * _LOG2_E)
            if mask is not None:
                _hide(logits, mask[:, first:last, :seen])
            if causal:
                _hide_later(logits, first + size - length)
            level = logits.amax(-1) if lse is None else lse[:, first:last].to(self._kind) * _LOG2_E
            torch.nan_to_num_(level, nan=0.0, neginf=0.0)  # a query that sees nothing
            logits.sub_(level[..., None]).exp2_()
            factor = torch.ones_like(level) if weights is None else weights[:, first:last]
            if lse is None:
                factor = factor / logits.sum(-1).clamp_min_(torch.finfo(self._kind).tiny)
            rows, factors = logits.view(len(out), -1, seen), factor.reshape(len(out), -1)
            for head, total in enumerate(out[:, :seen]):
                total.addmv_(rows[head].T, factors[head])

    def _logits(self, query: Tensor, key: Tensor, scale: float) -> Tensor:
        """`[G, c, S]` of queries `[G, c, D]` and keys `[S, D]`, in one product."""
        group, count, width = query.shape
        rows = self._buffer("queries", group * count * width).view(group, count, width)
        rows.copy_(query).mul_(scale)
        logits = self._buffer("logits", group * count * len(key)).view(group * count, len(key))
        torch.mm(rows.view(group * count, width), key.T, out=logits)
        return logits.view(group, count, len(key))

    def _buffer(self, name: str, count: int) -> Tensor:
        held = self._held.get(name)
        if held is None or len(held) < count:
            held = self._held[name] = torch.empty(count, dtype=self._kind, device=self._device)
        return held[:count]


def _hide(logits: Tensor, mask: Tensor) -> None:
    if mask.dtype == torch.bool:
        logits.masked_fill_(~mask, -torch.inf)
    else:
        logits.add_(mask, alpha=_LOG2_E)


def _hide_later(logits: Tensor, last: int) -> None:
    """Hide from query i of `[G, c, S]` the keys behind `last + i`."""
    begin = max(0, last + 1)
    corner = logits[..., begin:]
    if corner.shape[-1]:
        later = torch.ones(corner.shape[1:], dtype=torch.bool, device=logits.device)
        corner.masked_fill_(later.triu_(last + 1 - begin), -torch.inf)
