"""Layers whose heads keep unlike numbers of entries.

What heads keep lies one head behind the other in a pack of its row (`ops.ragged`), so that no
padding is stored; attention gets rows as long as the longest head, and a mask for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmfast.caches.plan import CachePlan
from mmfast.caches.store import Left
from mmfast.core.kv import KVBlock
from mmfast.core.reduction import Reduction
from mmfast.core.tokens import Tokens
from mmfast.models.kv.notes import KIND, PADDING, entries, fill
from mmfast.models.kv.packs import PackedRow, packed_layer, settle
from mmfast.models.reduction.cache_layers import is_short
from mmfast.ops.eviction import OTHERS, mixed_beside
from mmfast.ops.ragged import RaggedRows, right_aligned

# `(whole, row, where)` -> keys, signals, and what heads may share (`kv.eviction.seen`).
Look = Callable[
    [tuple[Tensor, Tensor], int, Tensor], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
]


def alike(shared: Mapping[str, Tensor]) -> bool:
    """All heads hold the same: notes `[1 or H, n]` by name."""
    several = [each for each in shared.values() if each.shape[0] > 1]
    return all(bool((each == each[:1]).all()) for each in several)


def of_head(
    keys: Tensor, signals: Mapping[str, Tensor], shared: Mapping[str, Tensor], head: int
) -> Tokens:
    """Keys and signals of one head, `[1, n, d]`."""
    mine = {k: v if v.ndim == 0 else v[head : head + 1] for k, v in signals.items()}
    mine |= {name: each.expand(len(keys), -1)[head] for name, each in shared.items()}
    return Tokens(keys[head : head + 1], signals=mine)


def choose_by_head(
    plan: CachePlan, keys: Tensor, signals: dict[str, Tensor], shared: dict[str, Tensor]
) -> Reduction:
    """Choose head by head, where heads hold different tokens since an earlier prompt."""
    heads = range(len(keys))
    found = [plan.reduce(of_head(keys, signals, shared, head)).select(0) for head in heads]
    length = max(r.m for r in found)
    return Reduction.stack([_grown(r, length) for r in found], (len(keys),))


def _grown(reduction: Reduction, length: int) -> Reduction:
    """Keep the most recent of the dropped entries, too, so that heads hold equally many."""
    missing = length - reduction.m
    if missing == 0:
        return reduction
    target = reduction.keep.gather(-1, reduction.owner.clamp_min(0))
    alone = torch.ones(reduction.n, dtype=torch.bool, device=target.device)
    alone[reduction.keep] = False
    back = alone.nonzero()[:, 0][-missing:]
    if reduction.mix is not None:
        every = torch.arange(reduction.n, device=back.device)
        return mixed_beside(reduction, back, every, reduction.n)
    target = target.masked_fill(reduction.owner < 0, -1).index_copy(0, back, back)
    keep = torch.cat([reduction.keep, back])
    if reduction.pure:
        return Reduction.prune(keep, reduction.n)
    return Reduction.merge(keep, target, reduction.weight)


def evict_heads(
    cache: Any, index: int, plan: CachePlan, look: Look, drafts: int = 0
) -> tuple[int, int]:
    """Let a plan of role `heads` choose what stays in one shortened layer with notes.

    The last `drafts` entries stay, as they may be taken back. Returns entries per head before and
    after, mean over the heads, of all rows together.
    """
    layer = cache.layers[index]
    if layer.in_packs:
        layer.open()
    notes, n = fill(layer), entries(layer)
    batch, heads = layer.keys.shape[:2]
    real = (notes[KIND] != PADDING).expand(batch, heads, n)
    stays = real.clone()
    for row, mine in enumerate(real[:, :, : n - drafts].any(1)):
        where = mine.nonzero()[:, 0]
        found = look((layer.keys, layer.values), row, where)
        stays[row][:, where] = _marks(plan, *found)
    before, after = int(real.sum()), int(stays.sum())
    if before > after:
        _keep(cache, index, stays)
    elif not bool(real.all()):
        layer.valid = real.any(1)
    return before // heads, after // heads


def _marks(
    plan: CachePlan, keys: Tensor, signals: dict[str, Tensor], shared: dict[str, Tensor]
) -> Tensor:
    """Return which of the entries `[H, n]` of a row stay."""
    if alike(shared):
        signals |= {name: each[0] for name, each in shared.items()}
        return plan.marks(Tokens(keys, signals=signals))
    held = shared[KIND].expand(len(keys), -1) != PADDING
    each = []
    for head, mine in enumerate(held):
        some = mine.nonzero()[:, 0]
        tokens = of_head(keys, signals, shared, head)
        each.append(_only(tokens, some))
    marks = held.clone()
    for row, mine, found in zip(marks, held, plan.marks_apart(each), strict=True):
        row[mine] = found
    return marks


def _only(tokens: Tokens, where: Tensor) -> Tokens:
    """Those entries of one head alone."""

    def pick(name: str, value: Tensor) -> Tensor:
        if value.ndim == 0 or name.startswith(OTHERS):
            return value
        return value.index_select(1 if value.ndim == 3 else -1, where)

    signals = {name: pick(name, value) for name, value in tokens.signals.items()}
    return Tokens(tokens.x.index_select(1, where), signals=signals)


def _keep(cache: Any, index: int, stays: Tensor) -> None:
    """Keep what `stays` `[B, H, n]` marks, in packs without padding."""
    before = entries(cache.layers[index])
    old, layer = fill(cache.layers[index]), packed_layer(cache, index, aligned=True)
    keys, values = layer.keys, layer.values
    rows = [
        KVBlock((RaggedRows.of(k, mine),), (RaggedRows.of(v, mine),))
        for k, v, mine in zip(keys, values, stays, strict=True)
    ]
    counts = [row.keys[0].counts for row in rows]
    width = max(map(max, counts))
    layer.rows = tuple(PackedRow((row,)) for row in rows)
    layer.front, layer.extra = (0,) * len(rows), width
    layer.keys, layer.values = (x[:, :, :0].clone() for x in (keys, values))
    notes = {
        name: torch.stack(
            [
                _aligned(note.expand(-1, stays.shape[1], -1)[b], stays[b], counts[b], width, name)
                for b in range(len(rows))
            ]
        )
        for name, note in old.items()
    }
    gaps = tuple(width - max(mine) for mine in counts)
    layer.gapped = len({count for mine in counts for count in mine}) > 1
    blank = keys[:, :, :1].expand(-1, -1, width, -1)  # only its width is read
    settle(cache, index, Left(KVBlock((blank,), (blank,)), notes, gaps), before)


def _aligned(note: Tensor, stays: Tensor, counts: tuple[int, ...], width: int, name: str) -> Tensor:
    """A note `[H, n]` on the entries that stay, `[H, width]`, with padding in front."""
    value = PADDING if name == KIND else 0
    out = note.new_full((len(counts), max(counts)), value)
    out[right_aligned(counts, note.device)] = note[stays]
    return F.pad(out, (width - max(counts), 0), value=value)


def held_by_heads(layer: Any) -> Tensor | None:
    """Entries that each head holds, `[B, H, 1, n]`; None where all heads hold equally many."""
    if not is_short(layer) or layer.notes is None:
        return None
    kinds = fill(layer)[KIND]
    if kinds.shape[1] == 1:
        return None
    real = kinds != PADDING
    return None if bool((real == real[:, :1]).all()) else real[:, :, None]
