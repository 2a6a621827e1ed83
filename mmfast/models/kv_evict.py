"""Evicting entries of a cache layer: keys keep the positions they were rotated to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.caches.store import beside, leave
from mmfast.core.budget import count
from mmfast.core.reduction import Reduction
from mmfast.core.spec import Spec
from mmfast.core.tokens import Tokens
from mmfast.models.kv_notes import BASIS, KIND, PADDING, PINNED, TOTAL, WINDOW, entries, fill
from mmfast.models.kv_store import StoredLayer, keep_stored
from mmfast.models.lengths import regroup

# `(row, where [n])` -> what becomes of these entries of a batch row, leading dims `[H]`.
Choose = Callable[[int, Tensor], Reduction]


def evict(cache: Any, index: int, choose: Choose, drafts: int = 0) -> tuple[int, int]:
    """Let a policy choose what stays in one layer of a cache.

    Args:
        cache: The cache.
        index: A shortened layer of it, with notes.
        choose: Asked once per batch row.
        drafts: Last entries that nobody asks about, because they may be taken back.

    Returns:
        Entries per head before and after, of all rows together.
    """
    layer = cache.layers[index]
    notes, length = fill(layer), entries(layer)
    real = notes[KIND][:, 0] != PADDING  # [B, n]; padding is the same in all heads
    where = [row.nonzero()[:, 0] for row in real]
    reductions = [
        beside(choose(b, mine[: len(mine) - drafts]), drafts) for b, mine in enumerate(where)
    ]
    before, after = sum(map(len, where)), sum(r.m for r in reductions)
    if before == after and all(r.pure for r in reductions):
        return before, after
    if isinstance(layer, StoredLayer) and all(r.pure for r in reductions):
        nothing = layer.keys.new_empty(*layer.keys.shape[:2], length, 0)
        left = leave(nothing, nothing, notes, where, reductions)
        keep_stored(layer, [r.keep for r in reductions])
    else:
        if isinstance(layer, StoredLayer):
            layer.open()  # what is merged is packed once more
        left = leave(layer.keys, layer.values, notes, where, reductions)
        layer.keys, layer.values = left.keys, left.values
        if isinstance(layer, StoredLayer):
            layer.front = left.gaps
    gone = length - left.width
    layer.gone, layer.dropped = layer.gone + gone, layer.dropped + gone
    layer.notes, layer.valid = left.notes, left.valid
    regroup(cache, index)
    return before, after


def basis(layer: Any, row: int) -> int:
    """Tokens that a row held behind its last prompt: what shares refer to from there on."""
    return int(layer.notes[BASIS][row, 0, -1]) if BASIS in layer.notes else 0


def chooser(plan: CachePlan, layer: Any, index: int, layers: int, prompt: bool = True) -> Choose:
    """What a plan makes of the entries of a layer, behind a prompt or a later step."""
    whole = layer.whole() if isinstance(layer, StoredLayer) else (layer.keys, layer.values)

    def choose(row: int, where: Tensor) -> Reduction:
        keys, values = (_pick(x[row], where, 1) for x in whole)
        notes = {k: _pick(note[row], where, -1) for k, note in layer.notes.items()}
        heads, kinds = len(keys), notes[KIND].long()
        mine = plan if prompt else settled(plan, basis(layer, row))
        signals = {
            "values": values,
            "kind": kinds[0],
            "layer": torch.tensor(index, device=keys.device),
            "layers": torch.tensor(layers, device=keys.device),
        }
        if WINDOW in notes:
            mass = notes[WINDOW]  # the rows of a softmax add up to one each
            signals["attn_window"] = mass / mass.sum(-1, keepdim=True).round().clamp_min(1)
        if TOTAL in notes:
            signals["attn_sum"] = notes[TOTAL]
        if bool((kinds == kinds[:1]).all()):
            return mine.reduce(Tokens(keys, signals=signals))
        return _by_head(mine, keys, signals, kinds, heads)

    return choose


def _pick(x: Tensor, where: Tensor, dim: int) -> Tensor:
    """Entries of one row, without a copy where that is all of them."""
    return x if len(where) == x.shape[dim] else x.index_select(dim, where)


def _by_head(
    plan: CachePlan, keys: Tensor, signals: dict[str, Tensor], kinds: Tensor, heads: int
) -> Reduction:
    """Heads that hold different tokens since an earlier prompt are asked one by one."""
    found = []
    for head in range(heads):
        mine = {k: v if v.ndim == 0 else v[head : head + 1] for k, v in signals.items()}
        mine["kind"] = kinds[head]
        found.append(plan.reduce(Tokens(keys[head : head + 1], signals=mine)).select(0))
    length = max(r.m for r in found)
    return Reduction.stack([_grown(r, length) for r in found], (heads,))


def _grown(reduction: Reduction, length: int) -> Reduction:
    """Heads hold equally many entries: the most recent of the dropped ones stay, too."""
    missing = length - reduction.m
    if missing == 0:
        return reduction
    target = reduction.keep.gather(-1, reduction.owner.clamp_min(0))
    alone = torch.ones(reduction.n, dtype=torch.bool, device=target.device)
    alone[reduction.keep] = False
    back = alone.nonzero()[:, 0][-missing:]
    target = target.masked_fill(reduction.owner < 0, -1).index_copy(0, back, back)
    keep = torch.cat([reduction.keep, back])
    if reduction.pure:
        return Reduction.prune(keep, reduction.n)
    return Reduction.merge(keep, target, reduction.weight)


def stayer(plan: CachePlan, layer: Any) -> Choose:
    """Behind the prompt: position policies go on, and what a policy pinned there stays."""

    def choose(row: int, where: Tensor) -> Reduction:
        kinds = layer.notes[KIND][row].index_select(-1, where).long()
        stays = settled(plan, basis(layer, row)).standing(kinds)  # [1 or H, n]
        if PINNED in layer.notes:
            stays = stays | layer.notes[PINNED][row].index_select(-1, where)
        stays = stays.expand(layer.keys.shape[1], -1)
        most = int(stays.sum(-1).max())
        # Recent tokens first: a stable sort puts what stays last, in order.
        keep = stays.to(torch.int8).argsort(dim=-1, stable=True)[:, -most:]
        return Reduction.prune(keep, len(where))

    return choose


def pin(plan: CachePlan, layer: Any) -> None:
    """Remember what position policies do not hold: it was chosen behind the prompt, for good."""
    kinds = fill(layer)[KIND]
    pinned = torch.zeros(kinds.shape, dtype=torch.bool, device=kinds.device)
    for row, mine in zip(pinned, kinds, strict=True):
        where = (mine[0] != PADDING).nonzero()[:, 0]
        row[:, where] = ~plan.standing(mine[:, where].long())
    layer.notes = {**layer.notes, PINNED: pinned}


def settled(plan: CachePlan, n: int) -> CachePlan:
    """The plan with every share as the number of tokens that it is of `n`.

    A policy that acts at every step would otherwise take a share of a share for ever.
    """
    specs = (*plan.position, *((plan.score,) if plan.score else ()))
    if not any(isinstance(spec.budget, float) for spec in specs):
        return plan
    score = None if plan.score is None else _settled(plan.score, n)
    return replace(plan, position=tuple(_settled(s, n) for s in plan.position), score=score)


def _settled(spec: Spec, n: int) -> Spec:
    return replace(spec, budget=count(spec.budget, n)) if isinstance(spec.budget, float) else spec
