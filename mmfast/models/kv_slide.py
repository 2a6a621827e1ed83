"""Position policies at every step: what one layer loses, the next ones lose without a look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmfast.caches.plan import CachePlan
from mmfast.models.kv_evict import basis, settled
from mmfast.models.kv_notes import KIND, PADDING, PINNED, entries, fill
from mmfast.models.kv_store import StoredLayer
from mmfast.models.lengths import regroup


@dataclass(eq=False)
class Slid:
    """What `slide` did to one layer, for the next ones, which hold the same.

    Attributes:
        before: Its notes, and how many entries it had and had lost by then.
        kinds: Of its entries.
        where: Entries that stay.
        layer: The layer itself, as it stands now.
    """

    before: tuple[Any, int, int]
    kinds: Tensor
    where: Tensor
    layer: Any


# By tokens of a layer, and tokens that shares refer to: where the entries are that stay.
Known = dict[tuple[int, int, torch.device], Tensor]
_MANY = 256  # lengths that are remembered; in the long run a window has one


def slide(cache: Any, index: int, plan: CachePlan, memo: list[Slid], known: Known) -> bool:
    """Let position policies evict from one conversation, where all its layers hold the same.

    Args:
        cache: The cache.
        index: A layer with notes.
        plan: The policies.
        memo: What was done to the layer before; empty at first.
        known: What numbers of tokens alone decide, kept from step to step.

    Returns:
        Whether that was done: False where rows, heads or packs call for `evict`.
    """
    layer = cache.layers[index]
    if isinstance(layer, StoredLayer) or PINNED in layer.notes:
        return False
    before = (layer.notes, entries(layer), layer.gone)
    last = memo[0] if memo else None
    if last is not None and last.before[0] is before[0] and last.before[1:] == before[1:]:
        _follow(layer, last)
        return True
    notes = fill(layer)
    kinds = notes[KIND]
    if len(kinds) > 1 or any(note.shape[1] > 1 for note in notes.values()):
        return False
    if last is None or not torch.equal(last.kinds, kinds):
        if bool((kinds == PADDING).any()):
            return False
        where = _standing(plan, layer, kinds, known)
    else:
        where = last.where.to(kinds.device)
    if len(where) < kinds.shape[-1]:
        _keep_only(layer, where)
        layer.notes = {name: note.index_select(-1, where) for name, note in notes.items()}
        layer.gone = before[2] + kinds.shape[-1] - len(where)
        regroup(cache, index)
    if last is not None and _alike(layer, last.layer):
        layer.notes = last.layer.notes  # from here on it is enough to see that it is the same
    memo[:] = [Slid(before, kinds, where, layer)]
    return True


def _standing(plan: CachePlan, layer: Any, kinds: Tensor, known: Known) -> Tensor:
    """The entries that stay; where only their number counts, looked up."""
    shares = any(isinstance(spec.budget, float) for spec in plan.position)
    whole = basis(layer, 0) if shares else 0
    key = (kinds.shape[-1], whole, kinds.device)
    if key in known:
        return known[key]
    where = settled(plan, whole).standing(kinds[0, 0].long()).nonzero()[:, 0]
    if not any(spec.method.needs for spec in plan.position) and len(known) < _MANY:
        known[key] = where
    return where


def _follow(layer: Any, last: Slid) -> None:
    """Do to a layer what was done to one that held the same."""
    if len(last.where) < last.before[1]:
        _keep_only(layer, last.where)
        layer.gone, layer.group = last.layer.gone, last.layer.group
        layer.uneven = last.layer.uneven
    layer.notes = last.layer.notes


def _keep_only(layer: Any, where: Tensor) -> None:
    gone = layer.keys.shape[2] - len(where)
    here = where.to(layer.keys.device)
    layer.keys, layer.values = (x.index_select(2, here) for x in (layer.keys, layer.values))
    layer.dropped, layer.valid = layer.dropped + gone, None


def _alike(one: Any, other: Any) -> bool:
    """Whether two layers hold the same tokens and know the same of them."""
    return (
        (one.gone, one.dropped, one.notes.keys()) == (other.gone, other.dropped, other.notes.keys())
        and one.uneven == other.uneven
        and all(
            a.device == b.device and torch.equal(a, b)
            for a, b in zip(one.notes.values(), other.notes.values(), strict=True)
        )
    )
